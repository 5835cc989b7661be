"""What kernels are asked for when they are asked for directions, and what they find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Wanted(NamedTuple):
    """The directions of layers that are alike, for gradients ``v: [layers, units(, inputs)]``; see ``orthogonal.steps``.

    By groups of units; each brought to length one, unless it is shorter than ``shortest``, if that is not 0; then all
    are ``by`` times as long.
    """

    v: Sequence[Tensor]
    root: Sequence[Tensor | None]
    groups: int
    shortest: float
    by: float


class Averaging(NamedTuple):
    """What ``v``, the averages of one layer, become before: these gradients go in, and once more, times a factor.

    That is ``proposal.averaged_``. The directions are so many times as long.
    """

    gradients: Sequence[Tensor]
    factor: float
    length: float


class Found(NamedTuple):
    """Shaped like the gradients; the slope along them, if these were given."""

    steps: list[Tensor]
    slope: float


class Lengths(NamedTuple):
    """Of the squared lengths of a layer's units: their sum, and which part of them take part."""

    total: float
    share: float
