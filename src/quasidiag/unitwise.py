"""The unitwise reduction: a full block for each unit, the reference that the other two approximate."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from quasidiag import reductions
from quasidiag.blocks import DiagonalBlock, State, in_precision
from quasidiag.kernels.rule import Rule
from quasidiag.layers.base import in_dtype_of, known_adapter
from quasidiag.moments import Moments, smallest


class UnitwiseBlock(DiagonalBlock):
    """The unitwise reduction: keeps each unit's full block, ``state[weight]["block"]: [units, 1 + n, 1 + n]``."""

    weight: nn.Parameter
    plain = mixes = False

    @cached_property
    def kind(self) -> Hashable | None:
        return None

    def start(self, state: State, a: Tensor, dtype: torch.dtype, identity: bool) -> None:
        rows = self.adapter.rows(self.module, self.weight)
        size = rows.shape[1] + (self.bias is not None)
        eye = float(identity) * torch.eye(size, dtype=dtype, device=rows.device)
        state[self.home]["updates"] = 0
        state[self.weight]["block"] = eye.repeat(rows.shape[0], 1, 1)

    def moments(self, state: State) -> Moments:
        block = state[self.weight]["block"]
        diagonal = block.diagonal(dim1=1, dim2=2)
        if self.bias is None:
            return Moments(None, None, self._unrows(diagonal))
        return Moments(diagonal[:, 0], self._unrows(block[:, 0, 1:]), self._unrows(diagonal[:, 1:]))

    def accumulate_(
        self,
        state: State,
        module: nn.Module,
        a: Tensor,
        w: Tensor,
        keep: float,
        gain: float | Tensor,
    ) -> None:
        w, gain = in_precision(w, gain, state[self.weight]["block"].dtype)
        block = known_adapter(module).full_block(
            module, in_dtype_of(w, a), w, self.bias is not None
        )
        state[self.weight]["block"].mul_(keep).add_(block, alpha=gain)

    def tidy_(self, state: State) -> None:
        block = state[self.weight]["block"]
        block.masked_fill_(block.abs() < smallest(block.dtype), 0.0)

    def solve(
        self, state: State, gradients: list[Tensor], eps: float, floor: float | None
    ) -> list[Tensor]:
        rows = self.adapter.rows(self.module, gradients[-1])
        v = rows if self.bias is None else torch.cat([gradients[0].unsqueeze(1), rows], dim=1)
        w = reductions.unitwise(self._guarded(state), v, eps=eps, floor=floor)
        return [self._unrows(w)] if self.bias is None else [w[:, 0], self._unrows(w[:, 1:])]

    def forms(self, state: State, steps: Sequence[Sequence[Tensor]]) -> Tensor:
        r"""The matrix of the products :math:`w^⊤ M w'` of all pairs of ``steps``, summed over units."""
        rows = [self.rows_of(step) for step in steps]
        w = torch.stack([torch.cat([*(b.unsqueeze(1) for b in w0), wi], 1) for *w0, wi in rows], 2)
        return (w.mT @ (self._guarded(state) @ w)).sum(0)

    def strength(self, state: State) -> Tensor:
        """The squared length of a unit's weights in the metric, minimised over its bias; the mean over units."""
        block = self._guarded(state)
        rows = self.adapter.rows(self.module, self.weight.detach()).to(block.dtype)
        n = rows.shape[1]
        found = torch.einsum("ui,uij,uj->u", rows, block[:, -n:, -n:], rows)
        if self.bias is not None:
            bias, mean = block[:, 0, 0], (block[:, 0, 1:] * rows).sum(1)
            found = found - torch.where(bias > 0, mean.square() / bias, 0.0)
        return found.mean()

    def _guarded(self, state: State) -> Tensor:
        """The blocks with the :attr:`safeguard` added to their diagonals."""
        block = state[self.weight]["block"]
        if self.safeguard is None:
            return block
        raw = block.diagonal(dim1=1, dim2=2)
        if self.bias is None:
            (weight,) = self._bounded(self.moments(state))
            bounded = self.adapter.rows(self.module, weight)
        else:
            m00, mii = raw[:, 0], raw[:, 1:]
            m00, mii = reductions.safeguarded(m00, block[:, 0, 1:], mii, *self.safeguard)
            bounded = torch.cat([m00.unsqueeze(1), mii], dim=1)
        return block + torch.diag_embed(bounded - raw)

    def descend_(self, state: State, gradients: list[Tensor], rule: Rule) -> bool:
        return False

    def _unrows(self, rows: Tensor) -> Tensor:
        return self.adapter.unrows(self.module, rows.contiguous(), self.weight.shape)
