r"""How far the layers go, relative to each other.

With their strengths made equal, steps say nothing any more of how far a layer should go: a unit's has length one in the
metric, in all of them. But a layer's weights have a length there too,

.. math:: ρ^2 = \frac1{\text{units}} \sum_{u,i} σ_{ui}^2 w_{ui}^2,

how much what its units say varies, as it is heard at the outputs; it does not depend on how inputs and activities are
encoded (with a bias: the variance of an input without one is measured from its zero). Layers go as far as :math:`ρ^p`
says, relative to the geometric mean of all: half of it at first, which is the quickest, and later on the more so the
longer training is.

Where a layer has more units than inputs, and is not wide, they cannot all go by one, only on the average. If part of them
hardly move, as those of pixels that are always black, the others go further than that. So with :math:`ℓ_u` for how far
they go, and :math:`s` for the share of those that take part,

.. math:: s = \frac1{\text{units}} \sum_u \min\Bigl(1, \frac{4 ℓ_u^2}{\overline{ℓ^2}}\Bigr),

it is :math:`ρ s^2` that counts, in the place of :math:`ρ`. (That it is the square is what measurement says.)

Whether that was far enough, the step after tells: what part of the slope along the layer's step it finds left, its echo.
All of a step is as long as is best for all layers together, and one that finds its slope as it was, while others have
crossed their valleys, goes further from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quasidiag import kernels
from quasidiag.auto.directions import mean
from quasidiag.auto.orthogonal import WIDE
from quasidiag.auto.stacks import Alone, Stack, in_order
from quasidiag.blocks import DiagonalBlock
from quasidiag.kernels import Lengths
from quasidiag.root import Root

if TYPE_CHECKING:
    from quasidiag.blocks import State

#: For its weights and units, no layer goes further than the mean by more than this factor, or less far.
UNEVEN = 4.0
#: By so much may the logarithm of a layer's :math:`ρ`, relative to the others', fall from one measurement to the next: a
#: layer that is made anew in mid-training must go as far as before, or it would not grow.
FALL = 0.02
#: A unit takes part if it goes at least so far as this, relative to what is usual, in squares.
HALF = 0.25
#: A layer goes further by this factor at most; so much does its logarithm grow at once, for an echo of one. How much of
#: its average a new echo is.
FURTHER, GROWTH, NEW = 4.0, 0.2, 0.6


def power(longer: float) -> float:
    """:math:`p`, when the gradient's average reaches back so many times as far as at first."""
    return 1 - 1 / (2 * longer)


def weights(blocks: Sequence[DiagonalBlock], stacks: Sequence[Stack], state: State) -> Tensor:
    r""":math:`ρ^2` of each layer; 0 for one that has no weights."""
    heavy = {
        b: b.rows_of([p.detach() for p in b.parameters])[-1:]
        for b in blocks
        if b.weight is not None
    }
    found = measured(stacks, state, heavy)
    if found is None:
        return in_order(blocks, stacks, [stack.strengths(state) for stack in stacks])
    totals = [found[b].total / len(heavy[b][0]) if b in found else 0.0 for b in blocks]
    return torch.tensor(totals, dtype=torch.float64)


def measured(
    stacks: Sequence[Stack], state: State, rows: Mapping[DiagonalBlock, Sequence[Tensor]]
) -> dict[DiagonalBlock, Lengths] | None:
    """How long layers' steps are in the metric, or weights alone, where one call of a kernel finds that for all."""
    if any(isinstance(stack, Alone) for stack in stacks):
        return None
    roots = {block: root for stack in stacks for block, root in stack.roots_of(state)}
    alone = {
        b: Root(None, None, roots[b].scale) if len(w) == 1 else roots[b] for b, w in rows.items()
    }
    found = kernels.lengths([(w, alone[block]) for block, w in rows.items()], HALF)
    return None if found is None else dict(zip(rows, found))


def strengths(squares: Tensor, before: Sequence[float | None]) -> list[float]:
    r""":math:`\ln ρ/\bar ρ` of each layer, from :math:`ρ^2`, which was ``before``; 0 if it has no weights that count yet."""
    of = (squares.log() / 2).tolist()
    changes = [x - b for x, b in zip(of, before) if b is not None and math.isfinite(x)]
    if changes:
        # The usual layer keeps its place, and none falls far below where it was.
        usual = median_high(changes)
        least = [-math.inf if b is None else b - FALL for b in before]
        of = [max(x - usual, low) for x, low in zip(of, least)]
    finite = [x for x in of if math.isfinite(x)]
    middle = sum(finite) / max(1, len(finite))
    return [x - middle if math.isfinite(x) else 0.0 for x in of]


def shares(
    stacks: Sequence[Stack],
    state: State,
    steps: Mapping[DiagonalBlock, Sequence[Tensor]],
    ranks: Any = None,
) -> dict[DiagonalBlock, float]:
    """Which part of a layer's units takes part in its step, where it has more of them than inputs.

    It is not asked where each unit goes by one, as in a wide layer.
    """
    asked = [stack for stack in stacks if _asked(stack.blocks[0])]
    blocks = [block for stack in asked for block in stack.blocks]
    if not blocks:
        return {}
    known = measured(asked, state, {b: b.rows_of(steps[b]) for b in blocks})
    if known is not None:
        found = torch.tensor([known[b].share for b in blocks], dtype=torch.float64)
    else:
        rows = [stack.rows([steps[block] for block in stack.blocks]) for stack in asked]
        squares = [stack.root(state).lengths(w) for stack, w in zip(asked, rows)]
        found = in_order(blocks, asked, [share(x) for x in squares])
    return dict(zip(blocks, mean(found, ranks).tolist()))


def _asked(block: DiagonalBlock) -> bool:
    """Whether a layer has more units than inputs, and is not wide."""
    *bias, rows = block.rows_of(block.parameters)
    return rows.shape[1] + len(bias) < min(rows.shape[0], WIDE + 1)


def share(squares: Tensor) -> Tensor:
    """Of units whose steps have these squared lengths, ``[..., units]``: the part that is not much shorter than usual."""
    usual = squares.mean(-1, keepdim=True)
    return (squares / (HALF * usual)).nan_to_num(1.0).clamp_max(1.0).mean(-1)


def echoes(before: Sequence[float], slopes: Sequence[float], falls: Sequence[float]) -> list[float]:
    """The averages, with what is left of the slope along each layer's step; one that did not descend keeps its own."""
    fresh = [min(max(s / f, -1.0), 1.0) if f < 0 else b for s, f, b in zip(slopes, falls, before)]
    return [b + NEW * (x - b) for b, x in zip(before, fresh)]


def further(
    before: Sequence[float], echoes: Sequence[float], falls: Sequence[float]
) -> list[float]:
    """The logarithm of how much further each layer goes than its weights say.

    It grows where more than usual of the slope is left, and falls again where it is less or the valley is crossed.
    """
    left = [max(e, 0.0) for e, fall in zip(echoes, falls) if fall < 0]
    usual = sum(left) / max(1, len(left))
    growth = [
        GROWTH * (e - usual if e > 0 else e) if fall < 0 else 0.0 for e, fall in zip(echoes, falls)
    ]
    return [min(max(b + x, 0.0), math.log(FURTHER)) for b, x in zip(before, growth)]


def proportions(
    strengths: Sequence[float],
    shares: Sequence[float],
    power: float,
    further: Sequence[float],
) -> list[float]:
    r""":math:`(ρ s^2/\bar ρ)^p`, within bounds, and how much further than that."""
    logs = [x + 2 * math.log(share) for x, share in zip(strengths, shares)]
    found = [min(max(math.exp(power * x), 1 / UNEVEN), UNEVEN) for x in logs]
    return [x * math.exp(more) for x, more in zip(found, further)]
