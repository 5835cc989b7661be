r"""Takes a step, :math:`θ ← θ + δ`, and updates the sums of the last steps and the offsets from rest with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quasidiag import kernels
from quasidiag.auto import rest
from quasidiag.moments import cast

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian


def move_(
    optimizer: Riemannian, direction: dict[Tensor, Tensor], by: float, settles: bool = False
) -> None:
    """Move parameters by ``by`` times their ``direction``, which may be overwritten by that move.

    The move is added to the sum of updates since the last measurement (``state["update"]``) and to the offset from rest
    (``state["apart"]``). With ``settles``, a kernel that can brings the parameters back to rest at once: the caller
    promises that nothing else moves them in this step.
    """
    parameters, ws = [*direction], [*direction.values()]
    states = [optimizer.state[p] for p in parameters]
    aparts, keep = rest.aparts(optimizer, states, parameters), rest.keep(optimizer)
    ways = [state.get("update") for state in states]
    settles = settles and not [s for s, e in zip(states, aparts) if not (e is None or s["ahead"])]
    moved = ws
    norms = kernels.move_(parameters, ws, by, aparts, keep, ways, settles)
    if norms is None:
        torch._foreach_mul_(ws, by)
        moved = _moved_(parameters, ws)
        rest.displace_(aparts, moved, keep)
        known = [(way, u) for way, u in zip(ways, moved) if way is not None]
        if known:
            torch._foreach_add_([way for way, _ in known], [u for _, u in known])
    elif settles:
        for state, e, norm in zip(states, aparts, norms):
            if e is not None:
                state["ahead"], state["norm"] = False, norm
    rest.begin_(optimizer, parameters, states, moved, keep)
    fresh = [(state, u) for state, u, way in zip(states, moved, ways) if way is None]
    parts = [u for _, u in fresh if u._base is not None]  # views keep a whole stack alive
    copies = iter(torch._foreach_mul(parts, 1.0) if parts else ())
    for state, u in fresh:
        state["update"] = u if u._base is None else next(copies)


def _moved_(parameters: Sequence[Tensor], ws: Sequence[Tensor]) -> list[Tensor]:
    """Move parameters by ``ws``; return by how much they moved, which in low precision is rounded."""
    befores = {p: p.detach().to(w.dtype) for p, w in zip(parameters, ws) if p.dtype != w.dtype}
    torch._foreach_add_([*parameters], [cast(w, p.dtype) for p, w in zip(parameters, ws)])
    return [
        p.detach().to(w.dtype) - befores[p] if p in befores else w for p, w in zip(parameters, ws)
    ]
