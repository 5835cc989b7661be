"""Inputs and results of the kernels that find directions and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Wanted(NamedTuple):
    """Layers of one shape, with gradients ``v: [layers, units(, inputs)]``, whose directions (``orthogonal.steps``) to find.

    Each of ``groups`` groups of units is made orthogonal. Then, if ``shortest`` is not 0, each unit is brought to length
    one, or divided by ``shortest`` if it is shorter than that; last, all are multiplied by ``by``.
    """

    v: Sequence[Tensor]
    root: Sequence[Tensor | None]
    groups: int
    shortest: float
    by: float


class Place(NamedTuple):
    """Where groups of units lie among the matrices of a ``room``: one after the other from the ``first`` on.

    Of each matrix they take the first rows, or the first columns if it is ``turned``.
    """

    room: Tensor
    first: int
    turned: bool


class Averaging(NamedTuple):
    """Gradients to take into the averages ``v`` of one layer before its direction is found (``proposal.averaged_``).

    The direction is then multiplied by ``length``.
    """

    gradients: Sequence[Tensor]
    factor: float
    length: float


class Found(NamedTuple):
    """Steps shaped like the gradients, and the slope along them if gradients to average were given (else 0)."""

    steps: list[Tensor]
    slope: float


class Lengths(NamedTuple):
    """Of the squared lengths of a layer's units: their sum, and the share of units that take part in the step."""

    total: float
    share: float
