"""What a kernel is asked for when it is asked for directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Wanted(NamedTuple):
    """The directions of layers that are alike, for gradients ``v: [layers, units(, inputs)]``; see ``orthogonal.steps``.

    By groups of units; each brought to length one, unless it is shorter than ``shortest``, or else ``by`` times as long.
    """

    v: Sequence[Tensor]
    root: Sequence[Tensor | None]
    groups: int
    shortest: float
    by: float
