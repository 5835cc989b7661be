r"""How far the layers go, relative to each other: their proportions.

An orthogonalised direction does not say how far a layer should go: in every layer, each unit goes by one in the metric.
But a layer's weights have a length in the metric too,

.. math:: ρ^2 = \frac1{\text{units}} \sum_{u,i} σ_{ui}^2 w_{ui}^2,

how much the outputs of its units vary, weighted by how much they matter to the network's outputs. In a layer with a bias
it does not depend on how inputs and activities are encoded. (Without one, the variance of an input is measured from zero.)
A layer's direction is multiplied by :math:`(ρ/\bar ρ)^p`, where :math:`\bar ρ` is the geometric mean of all layers. The
power is a half at first, which is the quickest, and grows towards one in the course of training.

In a layer with more units than inputs that is not wide, the units cannot all go by one, only their average does. If some
hardly move, such as those of pixels that are always black, the others go further than that. So with the length
:math:`ℓ_u` of a unit's direction, and the share :math:`s` of the units that take part,

.. math:: s = \frac1{\text{units}} \sum_u \min\Bigl(1, \frac{4 ℓ_u^2}{\overline{ℓ^2}}\Bigr),

:math:`ρ s^2` takes the place of :math:`ρ`. (That it is the square is a measured result.)

The step after a measured one tells whether a layer went far enough, by its echo: the part of the slope along the layer's
step that is left. All layers share one step length, the best for all of them together. A layer whose slope is still
there, while others have crossed their valleys, goes further from then on.
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

#: Because of its weights and units, no layer goes further than the mean by more than this factor, or less far.
UNEVEN = 4.0
#: The logarithm of a layer's :math:`ρ`, relative to the others', may fall by so much from one measurement to the next: a
#: layer that is reinitialised during training must go about as far as before, or its weights would not grow.
FALL = 0.02
#: A unit takes part in full if its squared length is at least this part of the mean squared length.
HALF = 0.25
#: A layer goes further because of its echo by a factor of ``FURTHER`` at most, whose logarithm grows by ``GROWTH`` at once
#: for an echo of one. ``NEW`` is the weight of a new echo in its average.
FURTHER, GROWTH, NEW = 4.0, 0.2, 0.6


def power(longer: float) -> float:
    """The power :math:`p`, when the gradient's average reaches back ``longer`` times as far as at first."""
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
    """The lengths in the metric of layers' steps, or of weights alone, by one kernel call; ``None`` if no kernel can."""
    if any(isinstance(stack, Alone) for stack in stacks):
        return None
    roots = {block: root for stack in stacks for block, root in stack.roots_of(state)}
    alone = {
        b: Root(None, None, roots[b].scale) if len(w) == 1 else roots[b] for b, w in rows.items()
    }
    found = kernels.lengths([(w, alone[block]) for block, w in rows.items()], HALF)
    return None if found is None else dict(zip(rows, found))


def strengths(squares: Tensor, before: Sequence[float | None]) -> list[float]:
    r""":math:`\ln ρ/\bar ρ` of each layer from :math:`ρ^2` and the last result ``before``; 0 if new and without weights."""
    of = (squares.log() / 2).tolist()
    changes = [x - b for x, b in zip(of, before) if b is not None and math.isfinite(x)]
    if changes:
        # Relative to the median layer, none may fall far below its last value.
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
    """The share :math:`s` of a layer's units that take part in its step, for layers with more units than inputs.

    Wide layers are left out, because each of their units goes by one.
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
    """The share :math:`s` of units that take part, from the squared lengths of their steps, ``[..., units]``."""
    usual = squares.mean(-1, keepdim=True)
    return (squares / (HALF * usual)).nan_to_num(1.0).clamp_max(1.0).mean(-1)


def echoes(before: Sequence[float], slopes: Sequence[float], falls: Sequence[float]) -> list[float]:
    """The layers' average echoes, new ones ``slopes / falls`` taken in; a layer that did not descend keeps its average."""
    fresh = [min(max(s / f, -1.0), 1.0) if f < 0 else b for s, f, b in zip(slopes, falls, before)]
    return [b + NEW * (x - b) for b, x in zip(before, fresh)]


def further(
    before: Sequence[float], echoes: Sequence[float], falls: Sequence[float]
) -> list[float]:
    """The logarithm of the factor by which each layer goes further because of its echo.

    It grows where the echo is above the mean of all layers, and falls where it is below or negative (valley crossed).
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
    r"""The factor of each layer's direction: :math:`(ρ s^2/\bar ρ)^p`, within bounds, times :math:`e^\text{further}`."""
    logs = [x + 2 * math.log(share) for x, share in zip(strengths, shares)]
    found = [min(max(math.exp(power * x), 1 / UNEVEN), UNEVEN) for x in logs]
    return [x * math.exp(more) for x, more in zip(found, further)]
