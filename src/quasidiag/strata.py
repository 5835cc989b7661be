r"""A few samples that stand for all of a minibatch: more of those that matter, and each of these for fewer others.

A sample matters by the length :math:`s` of the derivative at its output. Sorted by it, the samples are cut into ``STRATA``
strata of equal mass, where a sample has the mass :math:`s + \bar s`, and about as many are taken from each stratum, at even
distances. Where all samples matter alike, the strata are equal. Where a few matter more than all others together, as in a
classifier that knows its data by heart, these are all taken.

How many samples matter is :math:`(\sum s)^2 / \sum s^2` (Kish 1965): all, if they do so alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: The number of strata, and the least number of samples that are chosen, of twice as many.
STRATA, FEW = 4, 64


class Stratum(NamedTuple):
    """``kept`` samples, each of which stands for ``each``."""

    kept: int
    each: float


class Part:
    """Some of the ``samples``, in their order, by the numbers ``picked``, which are given stratum by stratum.

    They are chosen on the CPU, in numpy: a device takes longer to begin with so few numbers than numpy with all of them.
    """

    def __init__(
        self, samples: int, picked: np.ndarray, strata: list[Stratum], device: torch.device
    ) -> None:
        self.samples, self.strata = samples, strata
        order = picked.argsort()  # a model may rely on the order, as of sorted sequences
        self.picked = torch.from_numpy(picked[order]).to(device)
        self._order = order

    @classmethod
    def even(cls, samples: int, kept: int, device: torch.device) -> Part:
        """So many samples, at even distances because they may be sorted."""
        picked = np.arange(kept) * samples // kept
        return cls(samples, picked, [Stratum(kept, samples / kept)], device)

    @property
    def kept(self) -> int:
        """How many samples these are."""
        return len(self.picked)

    @property
    def share(self) -> float:
        """The share of the samples that these are."""
        return self.kept / self.samples

    @property
    def chosen(self) -> bool:
        """Whether the samples were chosen by how much they matter, so that some stand for more than others."""
        return len(self.strata) > 1

    def rows(self, x: Tensor) -> Tensor:
        """This part of the rows of ``x``, which has the same number of rows for every sample."""
        of_each = x.unflatten(0, (self.samples, -1))
        return of_each.index_select(0, self.picked.to(x.device)).flatten(0, 1)

    def alone(self, x: Tensor) -> Tensor:
        """``x``, with the same number of rows for every sample, and zeros in those of the others."""
        return torch.where(self._mine(x), x, 0.0)

    def holds(self, x: Tensor) -> bool:
        """Whether ``x``, with the same number of rows for every sample, has nothing but zeros in those of the others."""
        return not torch.where(self._mine(x), 0.0, x).any()

    def _mine(self, x: Tensor) -> Tensor:
        """Whether rows of ``x`` are of this part, of a shape to go with it."""
        mine = torch.zeros(self.samples, dtype=torch.bool, device=x.device)
        mine[self.picked.to(x.device)] = True
        return mine.repeat_interleave(len(x) // self.samples).view(-1, *[1] * (x.dim() - 1))

    def weights(self, rows: Tensor) -> Tensor:
        """How many samples each of the ``rows`` of this part stands for, of a shape to multiply them by."""
        each = self._each.to(rows.device, rows.dtype)
        return each.repeat_interleave(len(rows) // self.kept).view(-1, *[1] * (rows.dim() - 1))

    def sorted(self, x: Tensor) -> Tensor:
        """The part's rows of an output or a target, stratum by stratum."""
        if not self.chosen:
            return x
        of_each = x.unflatten(0, (self.kept, -1))
        return of_each.index_select(0, self._places.to(x.device)).flatten(0, 1)

    @cached_property
    def _each(self) -> Tensor:
        """How many samples each sample stands for."""
        each = np.repeat([s.each for s in self.strata], [s.kept for s in self.strata])[self._order]
        device = self.picked.device
        return torch.from_numpy(each.astype(np.float32) if device.type == "mps" else each).to(
            device
        )

    @cached_property
    def _places(self) -> Tensor:
        """Where the samples are, stratum by stratum."""
        return torch.from_numpy(self._order.argsort()).to(self.picked.device)

    def split(self, x: Tensor) -> Iterator[tuple[float, Tensor]]:
        """The part's rows of an output or a target, stratum by stratum, with what a sample of each stands for."""
        rows = len(x) // self.kept
        pieces = self.sorted(x).split([rows * stratum.kept for stratum in self.strata])
        return zip((stratum.each for stratum in self.strata), pieces)


class Strata:
    """The samples of a minibatch in the order of how much they matter, by the rows of ``derivatives``, one for each."""

    def __init__(self, derivatives: Tensor) -> None:
        dtype = torch.promote_types(derivatives.dtype, torch.float32)
        lengths = torch.linalg.vector_norm(derivatives.detach(), dim=1, dtype=dtype)
        sizes = lengths.cpu().numpy()
        sizes = np.where(np.isfinite(sizes), sizes, np.zeros_like(sizes))
        self._device, self._order = derivatives.device, (-sizes).argsort(kind="stable")
        sizes = sizes[self._order]
        sizes = sizes / max(sizes[0], np.finfo(sizes.dtype).tiny)  # squares might underflow
        self.samples = len(sizes)
        mass = (sizes + sizes.mean()).cumsum(dtype=np.float64)
        cuts = mass.searchsorted(np.arange(1, STRATA) / STRATA * mass[-1]) + 1
        self._cuts = [0, *(min(int(cut), self.samples) for cut in cuts), self.samples]
        squares = float(np.square(sizes).sum())
        #: How many samples matter; all, if none does.
        self.matter = float(sizes.sum()) ** 2 / squares if squares else float(self.samples)

    def part(self, kept: int) -> Part:
        """So many samples that stand for all, ``STRATA`` at least."""
        strata: list[Stratum] = []
        places: list[np.ndarray] = []
        for after, (start, end) in zip(reversed(range(STRATA)), zip(self._cuts, self._cuts[1:])):
            size, left = end - start, kept - sum(stratum.kept for stratum in strata)
            few = min(size, math.ceil(left / (after + 1)))
            if few:
                strata.append(Stratum(few, size / few))
                places.append((2 * np.arange(few) + 1) * size // (2 * few) + start)
        return Part(self.samples, self._order[np.concatenate(places)], strata, self._device)

    @property
    def enough(self) -> int:
        """How many samples are enough: as many as matter; all, where a half of them is not enough.

        Rounded up to a multiple of ``FEW``, because a compiled model is compiled anew for each number.
        """
        few = FEW * math.ceil(self.matter / FEW)
        return few if 2 * few <= self.samples else self.samples
