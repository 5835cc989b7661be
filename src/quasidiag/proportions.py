r"""How far the layers go, relative to each other.

With their strengths made equal, steps say nothing any more of how far a layer should go: a unit's has length one in the
metric, in all of them. But a layer's weights have a length there too,

.. math:: ρ^2 = \frac1{\text{units}} \sum_{u,i} σ_{ui}^2 w_{ui}^2,

how much what its units say varies, as it is heard at the outputs; it does not depend on how inputs and activities are
encoded (with a bias: the variance of an input without one is measured from its zero). Layers go as far as :math:`ρ^p`
says, relative to the geometric mean of all: at first not at all, which is the quickest, and later on the more so the
longer training is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high
from typing import TYPE_CHECKING, Any

import torch

from quasidiag.blocks import DiagonalBlock
from quasidiag.quadratic import mean

if TYPE_CHECKING:
    from quasidiag.blocks import State

#: No layer goes further than the mean by more than this factor, or less far.
UNEVEN = 4.0
#: By so much may the logarithm of a layer's :math:`ρ`, relative to the others', fall from one measurement to the next: a
#: layer that is made anew in mid-training must go as far as before, or it would not grow.
FALL = 0.02


def power(longer: float) -> float:
    """:math:`p`, when the gradient's average reaches back so many times as far as at first."""
    return 1 - 1 / longer


def strengths(
    blocks: Sequence[DiagonalBlock], state: State, before: Sequence[float], ranks: Any = None
) -> list[float]:
    r""":math:`\ln ρ/\bar ρ` of each layer, which was ``before``; 0 for one that has no weights, or none that count yet."""
    found = [block.strength(state) for block in blocks]
    known = [x for x in found if x is not None]
    if not known:
        return [0.0] * len(blocks)
    # As one, or a device would be waited for as often as there are layers.
    numbers = torch.stack([x.double().to(known[0].device) for x in known])
    logs = iter((mean(numbers.cpu(), ranks).log() / 2).tolist())
    of = [-math.inf if x is None else next(logs) for x in found]
    if len(before) == len(of) and any(map(math.isfinite, of)):
        # The usual layer keeps its place, and none falls far below where it was.
        change = median_high(x - b for x, b in zip(of, before) if math.isfinite(x))
        of = [max(x - change, b - FALL) for x, b in zip(of, before)]
    finite = [x for x in of if math.isfinite(x)]
    middle = sum(finite) / max(1, len(finite))
    return [x - middle if math.isfinite(x) else 0.0 for x in of]


def proportions(strengths: Sequence[float], power: float) -> list[float]:
    r""":math:`(ρ/\bar ρ)^p`, within bounds."""
    return [min(max(math.exp(power * x), 1 / UNEVEN), UNEVEN) for x in strengths]
