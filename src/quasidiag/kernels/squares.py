"""Squared derivatives that are never written out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quasidiag import moments


class Squares(NamedTuple):
    """Stands for the weights ``w = (scale·delta)²`` of a record: the matrix product squares while it reads ``delta``.

    ``scale`` must not be zero.
    """

    delta: Tensor
    scale: float = 1.0

    def formed(self) -> Tensor:
        """The squares as a tensor, as by ``moments.square``."""
        dtype = torch.promote_types(self.delta.dtype, torch.float32)
        return moments.square(self.delta.to(dtype) * self.scale, dtype)

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.formed().to(dtype)

    def sum(self) -> Tensor:
        return self.formed().sum()

    def flatten(self, first: int, last: int) -> Squares:
        return self._replace(delta=self.delta.flatten(first, last))
