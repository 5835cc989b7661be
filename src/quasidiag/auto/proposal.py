r"""The direction of a step: the averaged gradient, orthogonalised layer by layer and multiplied by each layer's proportion.

The average reaches back over a part of the training so far: at first gradients are soon out of date, later they are
mostly noise. The proportions are computed in :mod:`quasidiag.auto.proportions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quasidiag import kernels
from quasidiag.auto import orthogonal
from quasidiag.auto.directions import Direction, mean
from quasidiag.auto.proportions import power, proportions, shares, strengths, weights
from quasidiag.auto.stacks import Stack
from quasidiag.blocks import DiagonalBlock
from quasidiag.moments import cast
from quasidiag.root import Root
from quasidiag.sums import dtype_of
from quasidiag.unitwise import UnitwiseBlock

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

#: The gradient is averaged over the last one in ``PART`` of all steps so far, but over ``FEWEST`` to ``MOST`` of them.
PART, FEWEST, MOST = 50, 5.0, 30.0
#: If the weights of an average add up to more than this, it needs no correction.
NEARLY = 0.999

Steps = dict[DiagonalBlock, list[Tensor]]


class Proposal(NamedTuple):
    """A direction, and what was found on the way to it.

    ``slopes`` has the slope along it, by its name (``"new"``), or nothing. ``weights`` are the :math:`ρ^2` of the layers
    that move, ``None`` if they were not measured in this step.
    """

    direction: dict[Tensor, Tensor]
    slopes: dict[str, float]
    weights: Tensor | None


def reach(steps: int) -> float:
    """The number :math:`h` of gradients that the average reaches back over, after ``steps`` steps."""
    return min(max(steps / PART, FEWEST), MOST)


def counted_(state: dict[str, Any], g: Tensor, new: float) -> float:
    """Before a gradient enters an average: the factor that makes the weights in the Nesterov average add up to one.

    ``state["seen"]``, which is updated, is what the weights of all gradients so far add up to: less than one at first.
    """
    if "average" not in state:
        state["average"], state["seen"] = torch.zeros_like(g), 0.0
    state["seen"] = seen = (1 - new) * state["seen"] + new
    whole = (1 - new) * seen + new
    return 1 / whole if whole <= NEARLY else 1.0


def averaged_(
    states: Sequence[dict[str, Any]],
    gradients: Sequence[Tensor],
    new: float,
    factors: Sequence[float],
) -> list[Tensor]:
    """Take gradients into their averages; return averages that have them twice (Nesterov), multiplied by ``factors``."""
    averages = [state["average"] for state in states]
    gradients = [cast(g, average.dtype) for g, average in zip(gradients, averages)]
    found = kernels.average_(averages, gradients, new, factors)
    if found is None:
        torch._foreach_lerp_(averages, gradients, new)
        found = [*torch._foreach_lerp(averages, gradients, new)]
        few = [i for i, factor in enumerate(factors) if factor != 1]
        if few:
            torch._foreach_mul_([found[i] for i in few], [factors[i] for i in few])
    return found


class Moving(NamedTuple):
    """A layer, its parameters that have a gradient, with their state and the factors from :func:`counted_`."""

    block: DiagonalBlock
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]
    factors: list[float]

    @property
    def whole(self) -> bool:
        """Whether all parameters of the layer have a gradient."""
        return len(self.parameters) == len(self.block.parameters)


def propose(optimizer: Riemannian, gradient: Direction, measures: bool) -> Proposal:
    """The direction *d*, from the averaged gradient; with ``measures`` the layers' proportions are measured, else reused."""
    assert optimizer.auto is not None
    new = 1 / reach(optimizer.auto.steps)
    layers = [_moving(optimizer, block, gradient, new) for block in optimizer._blocks]
    layers = [layer for layer in layers if layer.parameters]
    moving = [layer for layer in layers if optimizer._known(layer.block)]
    lengths = None if measures else _lengths(optimizer, moving)
    steps, slopes = _at_once(optimizer, moving, new, lengths)
    left = [layer for layer in layers if layer.block not in steps]
    if left:
        known = [layer for layer in moving if layer.block not in steps]
        others = _steps(optimizer, _averages(left, new), known)
        if lengths is not None:
            _scale_(others, lengths)
        steps |= others
    found = None
    if steps and lengths is None and proportioned(optimizer):
        lengths, found = _measured(optimizer, {x.block: steps[x.block] for x in moving})
        _scale_(steps, lengths)
        slopes = {block: slope * lengths[block] for block, slope in slopes.items()}
    direction = {p: w for x in moving for p, w in zip(x.parameters, steps[x.block])}
    whole = {"new": sum(slopes.values())} if len(slopes) == len(steps) else {}
    return Proposal(direction, whole, found)


def _moving(optimizer: Riemannian, block: DiagonalBlock, gradient: Direction, new: float) -> Moving:
    """The parameters of a layer that have a gradient, counted into their averages' weights."""
    found = [(p, g) for p in block.parameters if (g := gradient.get(p)) is not None]
    states = [optimizer.state[p] for p, _ in found]
    factors = [counted_(state, g, new) for state, (_, g) in zip(states, found)]
    return Moving(block, [p for p, _ in found], [g for _, g in found], states, factors)


def _averages(layers: Sequence[Moving], new: float) -> dict[Tensor, Tensor]:
    """The averaged gradients (:func:`averaged_`) of all parameters of these layers, computed together."""
    states = [state for layer in layers for state in layer.states]
    gradients = [g for layer in layers for g in layer.gradients]
    factors = [factor for layer in layers for factor in layer.factors]
    found = averaged_(states, gradients, new, factors)
    return dict(zip((p for layer in layers for p in layer.parameters), found))


class Plan:
    """Dense layers whose directions one call of a kernel finds; reused while roots and averages stay where they are."""

    def __init__(
        self, roots: Sequence[tuple[DiagonalBlock, Root]], averages: Sequence[Sequence[Tensor]]
    ) -> None:
        self._roots = [root for _, root in roots]
        self._addresses = [v.data_ptr() for some in averages for v in some]
        of = [(block, orthogonal.wanted(root, v)) for (block, root), v in zip(roots, averages)]
        able = {block: wanted for block, wanted in of if kernels.directed(wanted)}
        self.blocks, self.directions = [*able], orthogonal.directions([*able.values()])

    def holds(
        self, roots: Sequence[tuple[DiagonalBlock, Root]], averages: Sequence[Sequence[Tensor]]
    ) -> bool:
        """Whether these are still the same roots, and averages at the same addresses."""
        same = len(roots) == len(self._roots)
        same = same and all(root is before for (_, root), before in zip(roots, self._roots))
        return same and [v.data_ptr() for some in averages for v in some] == self._addresses


def _at_once(
    optimizer: Riemannian,
    moving: Sequence[Moving],
    new: float,
    lengths: Mapping[DiagonalBlock, float] | None,
) -> tuple[Steps, dict[DiagonalBlock, float]]:
    """The directions of dense layers, averaging included, and the slopes along them: those that one kernel call can find."""
    layers = {
        x.block: x
        for x in moving
        if x.block.plain and x.block.home.is_cpu and x.whole
        if len({*x.factors}) == 1  # they differ if a parameter was frozen for a while
    }
    if not (optimizer.orthogonal and layers):
        return {}, {}
    stacks = stacks_of(optimizer, layers)
    roots = [pair for stack in stacks for pair in stack.roots_of(optimizer.state)]
    averages = [[state["average"] for state in layers[block].states] for block, _ in roots]
    plan = optimizer._plan
    if plan is None or not plan.holds(roots, averages):
        plan = optimizer._plan = Plan(roots, averages)
    if not plan.blocks:
        return {}, {}
    averagings = [
        kernels.Averaging(
            layers[block].gradients,
            layers[block].factors[0],
            1.0 if lengths is None else lengths[block],
        )
        for block in plan.blocks
    ]
    found = plan.directions.find() if plan.directions.average(averagings, new) else None
    steps = dict(zip(plan.blocks, found or ()))
    return {b: x.steps for b, x in steps.items()}, {b: x.slope for b, x in steps.items()}


def _steps(optimizer: Riemannian, averaged: Direction, moving: Sequence[Moving]) -> Steps:
    """The directions of layers, from their averaged gradients and before any proportions."""
    state, found, rooted = optimizer.state, Steps(), Steps()
    for layer in moving:
        block = layer.block
        given = [part_of(averaged, p, dtype_of(block, state)) for p in block.parameters]
        if optimizer.orthogonal and layer.whole and not isinstance(block, UnitwiseBlock):
            rooted[block] = given
        else:
            d = _solved(optimizer, block, given, layer.whole)
            found[block] = [w for p, w in zip(block.parameters, d) if p in averaged]
    stacks = stacks_of(optimizer, rooted)
    return found | orthogonal.steps(stacks, state, rooted, optimizer.foreach is not False)


def _solved(
    optimizer: Riemannian, block: DiagonalBlock, given: list[Tensor], whole: bool
) -> list[Tensor]:
    """The Riemannian gradient of a block; brought to the length of orthogonal directions if others have those."""
    group, solve = optimizer._group[block.home], block.solve if whole else block.solve_part
    eps = group["eps"] + block.decay(optimizer.state)
    d = solve(optimizer.state, given, eps, group["floor"])
    return orthogonal.of_length(d, given, block.units) if optimizer.orthogonal else d


def proportioned(optimizer: Riemannian) -> bool:
    """Whether each layer's direction is multiplied by a proportion (:mod:`quasidiag.auto.proportions`)."""
    return optimizer.orthogonal and optimizer.reduction != "unitwise"


def _lengths(optimizer: Riemannian, moving: Sequence[Moving]) -> dict[DiagonalBlock, float] | None:
    """The proportions of the layers when they were last measured, shortened as they were then.

    ``None`` if there are none for as many layers.
    """
    assert optimizer.auto is not None
    known = optimizer.auto.proportions
    if not proportioned(optimizer) or len(known) != len(moving):
        return None
    by = optimizer.auto.shortened
    by = by if len(by) == len(known) else [1.0] * len(known)
    return {layer.block: length / x for layer, length, x in zip(moving, known, by)}


def _measured(
    optimizer: Riemannian, found: Mapping[DiagonalBlock, Sequence[Tensor]]
) -> tuple[dict[DiagonalBlock, float], Tensor]:
    """The proportion of each layer by its weights, units and echo, also kept in the report; and the layers' :math:`ρ^2`."""
    assert optimizer.auto is not None
    report, ranks, state = optimizer.auto, ranks_of(optimizer), optimizer.state
    moving = {i: block for i, block in enumerate(optimizer._blocks) if block in found}
    blocks, every = [*moving.values()], len(optimizer._blocks)
    kept = report.strengths if len(report.strengths) == every else [None] * every
    squares = weights(blocks, stacks_of(optimizer, blocks), state)
    fresh = _strengths(blocks, mean(squares, ranks), [kept[i] for i in moving])
    now = dict(zip(moving, fresh))
    report.strengths = [now.get(i, before) for i, before in enumerate(kept)]
    more = [report.further[i] if len(report.further) == every else 0.0 for i in moving]
    matrices = [b for b in blocks if b.mixes and len(found[b]) == len(b.parameters)]
    taking_part = shares(stacks_of(optimizer, matrices), state, found, ranks)
    p = power(reach(report.steps) / FEWEST)
    part = [taking_part.get(block, 1.0) for block in blocks]
    report.proportions = proportions(fresh, part, p, more)
    return dict(zip(blocks, report.proportions)), squares


def _strengths(
    blocks: Sequence[DiagonalBlock], squares: Tensor, before: Sequence[float | None]
) -> list[float]:
    r""":math:`\ln ρ/\bar ρ` of each layer that has weights; 0 for a bias alone, which has no part in the mean."""
    heavy = [k for k, block in enumerate(blocks) if block.weight is not None]
    found = dict(zip(heavy, strengths(squares[heavy], [before[k] for k in heavy])))
    return [found.get(k, 0.0) for k in range(len(blocks))]


def _scale_(steps: Steps, lengths: Mapping[DiagonalBlock, float]) -> None:
    of = [(w, lengths[block]) for block, ws in steps.items() for w in ws]
    if of:
        torch._foreach_mul_([w for w, _ in of], [x for _, x in of])


def part_of(u: Direction, p: Tensor, dtype: torch.dtype) -> Tensor:
    """The part of a direction that belongs to a parameter; zeros if it has none."""
    found = u.get(p)
    return torch.zeros_like(p, dtype=dtype) if found is None else cast(found, dtype)


def stacks_of(optimizer: Riemannian, blocks: Iterable[DiagonalBlock]) -> list[Stack]:
    """These layers in stacks, layers of one shape together."""
    return optimizer._stacks.of(blocks, optimizer.state, optimizer.foreach)


def ranks_of(optimizer: Riemannian) -> Any:
    """The process group whose ranks measure together; ``None`` if this one is alone."""
    return None if optimizer._exchange is None else optimizer._exchange.group
