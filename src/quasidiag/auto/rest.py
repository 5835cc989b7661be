r"""The parameters at rest, between two steps: an average of those that training visits.

Steps of the same strength in all directions do not get shorter near the bottom of a valley: they cross it back and forth.
So the parameters :math:`z` that training comes to are averaged,

.. math:: x ← x + \tfrac1w (z - x),

and :math:`x` is what the model holds between two steps, when it is evaluated or saved. A forward pass in training begins
by moving ahead to :math:`z = x + e`, and a step that moved by :math:`δ` ends by returning to rest:
:math:`e ← (1 - \tfrac1w)(e + δ)`, :math:`x = z - e`. A parameter that is changed in between (clamped, masked, loaded)
stays where it was put, and training goes on from there. Steps that are undone leave no trace: the offset :math:`e`
is then again what it was before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quasidiag import kernels
from quasidiag.auto.directions import before_way, gathered

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

#: The average reaches back over the last one in ``PART`` of all steps so far, and over ``MOST`` of them at most.
PART, MOST = 7, 30.0
#: State of an averaged parameter: :math:`e`, its copy at the last measurement, whether it is at :math:`z`, its norm at
#: rest, and whether that norm was loaded.
KEPT = ("apart", "mark", "ahead", "norm", "loaded")
#: Relative difference of norms of the same numbers, from another machine or another order of summation.
ROUNDING = 1e-6


def window(steps: int) -> float:
    """The number :math:`w` of steps that the average reaches back over, after ``steps`` steps; 1 at first."""
    return min(max(steps / PART, 1.0), MOST)


def keep(optimizer: Riemannian) -> float:
    """The factor :math:`1 - 1/w` of :math:`e + δ` in the next step."""
    assert optimizer.auto is not None
    return 1 - 1 / window(optimizer.auto.steps + 1)


def aparts(
    optimizer: Riemannian, states: Sequence[dict[str, Any]], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """The offset :math:`e` of each parameter from rest; ``None`` if it is not averaged, or does not move."""
    still = _still(optimizer)
    if not still:
        return [s.get("apart") for s in states]
    return [None if p in still else s.get("apart") for p, s in zip(parameters, states)]


def displace_(aparts: Sequence[Tensor | None], moved: Sequence[Tensor], keep: float) -> None:
    """A step has moved parameters: :math:`e ← (1 - \\tfrac1w)(e + δ)`."""
    going = [(e, u) for e, u in zip(aparts, moved) if e is not None]
    if going:
        torch._foreach_add_([e for e, _ in going], [u for _, u in going])
        torch._foreach_mul_([e for e, _ in going], keep)


def begin_(
    optimizer: Riemannian,
    parameters: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    moved: Sequence[Tensor],
    keep: float,
) -> None:
    """Start averaging parameters that a step has moved for the first time.

    Not those of low precision, which could not return to exactly where they were.
    """
    if not (optimizer.averaged and keep):
        return
    fresh = [(p, s, u) for p, s, u in zip(parameters, states, moved) if "apart" not in s]
    still = _still(optimizer) if fresh else ()
    for p, state, u in fresh:
        if p not in still and p.dtype == u.dtype:
            state |= {"apart": u * keep, "ahead": True}


def _still(optimizer: Riemannian) -> set[Tensor]:
    """The parameters that do not move because their ``lr`` is zero."""
    return {p for g in optimizer.param_groups if not float(g["lr"]) for p in g["params"]}


def correct_(optimizer: Riemannian, p: Tensor, moved: Tensor) -> None:
    """Correct the offset of a parameter that was moved by ``moved`` after the step just taken (into its bounds)."""
    assert optimizer.auto is not None
    if "apart" in optimizer.state[p]:
        optimizer.state[p]["apart"].add_(moved, alpha=1 - 1 / window(optimizer.auto.steps))


def lead_(optimizer: Riemannian) -> None:
    """Move ahead to where training is, :math:`z = x + e`.

    It writes to ``p.data``, unnoticed by autograd, because graphs of the parameters at rest (of a penalty on weights, say)
    may be waiting for the same backward pass.
    """
    found = _of(optimizer, ahead=False)
    for quick in (True, False):
        some = [(p, s) for p, s in found if isinstance(s["norm"], float) is quick]
        for state, same in zip([s for _, s in some], _led_(some, quick)):
            state["ahead"] = True
            if not same:  # the user has put it there, and a retreat leads back no further
                state.pop("mark", None)
                if "update" in state:
                    state["update"].zero_()
            if not optimizer.averaged:  # the state is from an optimizer that averages
                forget_(state)


def _led_(found: Sequence[tuple[Tensor, dict[str, Any]]], quick: bool) -> Sequence[bool]:
    """Move parameters by :math:`e`, and return which of them are as they were left; the others get :math:`e = 0`.

    Norms that are floats (``quick``) were found by a kernel. If torch compares them, which sums in another order, they may
    differ by rounding.
    """
    if not found:
        return []
    allowed = [ROUNDING if s.pop("loaded", False) else 0.0 for _, s in found]
    aparts, norms = [s["apart"] for _, s in found], [s["norm"] for _, s in found]
    same = kernels.lead_([p for p, _ in found], aparts, norms, allowed) if quick else None
    if same is None:
        data = [p.data for p, _ in found]
        same = _as_left(data, norms, [ROUNDING] * len(found) if quick else allowed)
        for e, left in zip(aparts, same):
            if not left:
                e.zero_()
        torch._foreach_add_(data, aparts)
    return same


def places(optimizer: Riemannian) -> dict[Tensor, Tensor]:
    """The averaged values :math:`x = z - e` of the parameters that are ahead, at :math:`z`."""
    apart = {p: state["apart"] for p, state in _of(optimizer, ahead=True)}
    return before_way(apart) if apart else {}


def mark_(optimizer: Riemannian) -> None:
    """Keep a copy of the offsets :math:`e`, because the steps that follow may be undone."""
    states = [state for _, state in _of(optimizer, ahead=True)]
    for state in states:
        if "mark" not in state:
            state["mark"] = torch.empty_like(state["apart"])
    if states:
        torch._foreach_copy_([s["mark"] for s in states], [s["apart"] for s in states])


def back_(state: dict[str, Any]) -> None:
    """Restore the offset that :func:`mark_` kept; a parameter without one had no offset from rest."""
    if "mark" in state:
        state["apart"].copy_(state["mark"])
    else:
        forget_(state)


def forget_(state: dict[str, Any]) -> None:
    """Stop averaging a parameter, and leave it where it is."""
    for key in KEPT:
        state.pop(key, None)


def settle_(optimizer: Riemannian) -> None:
    """Return to rest, :math:`x = z - e`."""
    found = _of(optimizer, ahead=True)
    if not found:
        return
    aparts = [state["apart"] for _, state in found]
    norms: Sequence[Any] | None = kernels.settle_([p for p, _ in found], aparts)
    if norms is None:
        data = [p.data for p, _ in found]
        torch._foreach_sub_(data, aparts)
        norms = kernels.norms(data)
    for (_, state), norm in zip(found, norms):
        state["ahead"], state["norm"] = False, norm


def _of(optimizer: Riemannian, ahead: bool) -> list[tuple[Tensor, dict[str, Any]]]:
    """The averaged parameters that are ``ahead`` or not, with their state; not those frozen or gone to another device."""
    return [
        (p, state)
        for p, state in optimizer.state.items()
        if state.get("ahead") is ahead and p.requires_grad and state["apart"].device == p.device
    ]


def _as_left(data: Sequence[Tensor], norms: Sequence[Any], allowed: Sequence[float]) -> list[bool]:
    """Which tensors have the norms that they were left with: a change of ``p.data`` shows in nothing else."""
    both = gathered([*kernels.norms(data), *map(torch.as_tensor, norms)])
    now, left = both.view(2, -1).tolist()
    return [abs(a - b) <= part * b for a, b, part in zip(now, left, allowed)]


def loaded_(states: Iterable[dict[str, Any]]) -> None:
    """Note that these states were loaded: their norms may be from another machine, and differ by rounding."""
    for state in states:
        if "norm" in state:
            state["loaded"] = True
