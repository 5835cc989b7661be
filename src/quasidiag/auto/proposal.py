r"""The direction of a step: the averaged gradient with its strengths equalised, and how long it is in each layer.

The average reaches back over a part of the training so far: at first gradients are soon out of date, later they are
mostly noise. How far the layers go relative to each other is the matter of :mod:`quasidiag.auto.proportions`.
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
from quasidiag.blocks import DiagonalBlock, UnitwiseBlock
from quasidiag.moments import cast
from quasidiag.root import Root
from quasidiag.sums import dtype_of

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

#: The gradient is averaged over the last one in so many of all steps so far, within these bounds.
PART, FEWEST, MOST = 50, 5.0, 30.0
#: Weights that add up to so much are as good as one.
NEARLY = 0.999

Steps = dict[DiagonalBlock, list[Tensor]]


class Proposal(NamedTuple):
    """A direction.

    And where these were found on the way, the slope along it, by its name, and the :math:`ρ^2` of the layers that move.
    """

    direction: dict[Tensor, Tensor]
    slopes: dict[str, float]
    weights: Tensor | None


def reach(steps: int) -> float:
    """Over about how many gradients the average goes, after so many steps."""
    return min(max(steps / PART, FEWEST), MOST)


def counted_(state: dict[str, Any], g: Tensor, new: float) -> float:
    """One more gradient is taken into an average: what it is multiplied by, for its weights to add up to one.

    ``seen`` is what the weights of all gradients so far add up to: less than one at first.
    """
    if "average" not in state:
        state["average"], state["seen"] = torch.zeros_like(g), 0.0
    state["seen"] = seen = (1 - new) * state.get("seen", 1.0) + new  # older states have none
    whole = (1 - new) * seen + new
    return 1 / whole if whole <= NEARLY else 1.0


def averaged_(
    states: Sequence[dict[str, Any]],
    gradients: Sequence[Tensor],
    new: float,
    factors: Sequence[float],
) -> list[Tensor]:
    """Take gradients into their averages; these, and once more the gradients (Nesterov), times the factors."""
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
    """A layer, those of its parameters that have a gradient, what is kept of them, and their averages' factors."""

    block: DiagonalBlock
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]
    factors: list[float]

    @property
    def whole(self) -> bool:
        """Whether all of it moves."""
        return len(self.parameters) == len(self.block.parameters)


def propose(optimizer: Riemannian, gradient: Direction, measures: bool) -> Proposal:
    """The direction *d*, from the averaged gradient. Layers go as far as they did when this was last measured."""
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
    """What is there of a layer, one more gradient counted."""
    found = [(p, g) for p in block.parameters if (g := gradient.get(p)) is not None]
    states = [optimizer.state[p] for p, _ in found]
    factors = [counted_(state, g, new) for state, (_, g) in zip(states, found)]
    return Moving(block, [p for p, _ in found], [g for _, g in found], states, factors)


def _averages(layers: Sequence[Moving], new: float) -> dict[Tensor, Tensor]:
    """Of all parameters of these layers, at one go."""
    states = [state for layer in layers for state in layer.states]
    gradients = [g for layer in layers for g in layer.gradients]
    factors = [factor for layer in layers for factor in layer.factors]
    found = averaged_(states, gradients, new, factors)
    return dict(zip((p for layer in layers for p in layer.parameters), found))


class Plan:
    """Dense layers whose directions a kernel finds at once, as long as their roots and averages stay where they are."""

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
        """Whether they do."""
        same = len(roots) == len(self._roots)
        same = same and all(root is before for (_, root), before in zip(roots, self._roots))
        return same and [v.data_ptr() for some in averages for v in some] == self._addresses


def _at_once(
    optimizer: Riemannian,
    moving: Sequence[Moving],
    new: float,
    lengths: Mapping[DiagonalBlock, float] | None,
) -> tuple[Steps, dict[DiagonalBlock, float]]:
    """Averages and directions of dense layers in one call, where a kernel can, and the slopes along them."""
    layers = {
        x.block: x
        for x in moving
        if x.block.plain and x.block.home.is_cpu and x.whole
        if len({*x.factors}) == 1  # or one was frozen for a while
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
    """Those of layers, from their averaged gradients."""
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
    """The Riemannian gradient of a block, as long as the others' directions."""
    group, solve = optimizer._group[block.home], block.solve if whole else block.solve_part
    d = solve(optimizer.state, given, group["eps"] + max(block.decays, default=0.0), group["floor"])
    return orthogonal.of_length(d, given, block.units) if optimizer.orthogonal else d


def proportioned(optimizer: Riemannian) -> bool:
    """Whether directions are brought to equal lengths, and then to those of their layers."""
    return optimizer.orthogonal and optimizer.reduction != "unitwise"


def _lengths(optimizer: Riemannian, moving: Sequence[Moving]) -> dict[DiagonalBlock, float] | None:
    """How far the layers went when that was last measured; ``None`` if other ones move."""
    assert optimizer.auto is not None
    known = optimizer.auto.proportions
    if not proportioned(optimizer) or len(known) != len(moving):
        return None
    return {layer.block: length for layer, length in zip(moving, known)}


def _measured(
    optimizer: Riemannian, found: Mapping[DiagonalBlock, Sequence[Tensor]]
) -> tuple[dict[DiagonalBlock, float], Tensor]:
    """How far each layer goes, as its weights and its units count (:mod:`quasidiag.auto.proportions`); and its weights."""
    assert optimizer.auto is not None
    report, ranks, state = optimizer.auto, ranks_of(optimizer), optimizer.state
    moving = {i: block for i, block in enumerate(optimizer._blocks) if block in found}
    blocks, every = [*moving.values()], len(optimizer._blocks)
    kept = report.strengths if len(report.strengths) == every else [None] * every
    squares = weights(blocks, stacks_of(optimizer, blocks), state)
    fresh = strengths(mean(squares, ranks), [kept[i] for i in moving])
    now = dict(zip(moving, fresh))
    report.strengths = [now.get(i, before) for i, before in enumerate(kept)]
    more = [report.further[i] if len(report.further) == every else 0.0 for i in moving]
    matrices = [b for b in blocks if b.mixes and len(found[b]) == len(b.parameters)]
    taking_part = shares(stacks_of(optimizer, matrices), state, found, ranks)
    p = power(reach(report.steps) / FEWEST)
    part = [taking_part.get(block, 1.0) for block in blocks]
    report.proportions = proportions(fresh, part, p, more)
    return dict(zip(blocks, report.proportions)), squares


def _scale_(steps: Steps, lengths: Mapping[DiagonalBlock, float]) -> None:
    of = [(w, lengths[block]) for block, ws in steps.items() for w in ws]
    if of:
        torch._foreach_mul_([w for w, _ in of], [x for _, x in of])


def part_of(u: Direction, p: Tensor, dtype: torch.dtype) -> Tensor:
    """A direction's part in a parameter."""
    found = u.get(p)
    return torch.zeros_like(p, dtype=dtype) if found is None else cast(found, dtype)


def stacks_of(optimizer: Riemannian, blocks: Iterable[DiagonalBlock]) -> list[Stack]:
    """These layers, those of one shape together."""
    return optimizer._stacks.of(blocks, optimizer.state, optimizer.foreach)


def ranks_of(optimizer: Riemannian) -> Any:
    """Who measures together."""
    return None if optimizer._exchange is None else optimizer._exchange.group
