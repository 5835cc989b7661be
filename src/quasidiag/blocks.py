"""The units of one layer: which parameters form their blocks, and the metric that is kept for them.

The metric lives in the optimizer's own state: ``state[bias]["m00"]``, ``state[weight]["m0i"]`` and
``state[weight]["mii"]``, each in its parameter's shape, measured from the point ``state[weight]["shift"]``.
One class a reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quasidiag import reductions
from quasidiag.layers import Adapter, adapter_of
from quasidiag.moments import Moments, recentre, smallest

State = Mapping[Tensor, dict[str, Any]]

#: Every so many metric updates the shift follows the activities, and moments too small to matter become zero.
TIDY_EVERY = 64


class DiagonalBlock:
    """Keeps ``m00`` and ``mii``; also what a layer without a bias (or with a frozen one) comes to."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        adapter: Adapter,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
    ) -> None:
        self.name, self.module, self.adapter = name, module, adapter
        self.weight, self.bias = weight, bias
        #: Bias first, as in the paper.
        self.parameters = [p for p in (bias, weight) if p is not None]
        #: The parameter whose state counts the updates, and whose param group sets gamma and eps.
        self.home = self.parameters[-1]

    def start(self, state: State, a: Tensor, dtype: torch.dtype, identity: bool) -> None:
        """Make room for the metric: zeros, or the identity matrix."""
        state[self.home]["updates"] = 0
        for parameter, key in ((self.bias, "m00"), (self.weight, "mii")):
            if parameter is not None:
                full = torch.full_like(parameter, float(identity), dtype=dtype)
                state[parameter][key] = full.detach()

    def kept(self, state: State) -> Moments:
        """The moments as they are stored."""
        weight = {} if self.weight is None else state[self.weight]
        bias = {} if self.bias is None else state[self.bias]
        return Moments(bias.get("m00"), weight.get("m0i"), weight.get("mii"))

    def moments(self, state: State) -> Moments:
        """The averages so far, of the activities themselves."""
        return self.kept(state)

    def accumulate_(
        self, state: State, module: nn.Module, a: Tensor, w: Tensor, keep: float, gain: float
    ) -> None:
        """``M ← keep·M + gain·Σ w (1, a)(1, a)ᵀ``, in the entries that the reduction keeps."""
        _adapter(module).accumulate_(module, self.kept(state), _cast(a, w), w, keep, gain)

    def finish_update(self, state: State) -> None:
        """Count the update and, now and then, tidy the moments."""
        state[self.home]["updates"] += 1
        if state[self.home]["updates"] % TIDY_EVERY == 0:
            self.tidy_(state)

    def tidy_(self, state: State) -> None:
        for moment in self.kept(state):
            if moment is not None:
                moment.masked_fill_(moment.abs() < smallest(moment.dtype), 0.0)

    def solve(
        self, state: State, gradients: list[Tensor], eps: float, floor: float | None
    ) -> list[Tensor]:
        """The Riemannian gradient of each of :attr:`parameters`."""
        kept = [m for m in self.kept(state) if m is not None]
        return [reductions.diagonal(m, v, eps=eps, floor=floor) for m, v in zip(kept, gradients)]


class QuasiDiagonalBlock(DiagonalBlock):
    """Keeps ``m00``, ``m0i`` and ``mii``, measured from a shift where the layer allows it."""

    weight: nn.Parameter
    bias: nn.Parameter

    def start(self, state: State, a: Tensor, dtype: torch.dtype, identity: bool) -> None:
        super().start(state, a, dtype, identity)
        state[self.weight]["m0i"] = torch.zeros_like(self.weight, dtype=dtype).detach()
        if self.adapter.shiftable:
            state[self.weight]["shift"] = torch.zeros(a.shape[-1], dtype=dtype, device=a.device)
            self._move(state, a.to(dtype).flatten(0, -2).mean(0))

    def moments(self, state: State) -> Moments:
        kept, shift = self.kept(state), state[self.weight].get("shift")
        return kept if shift is None else recentre(kept, -shift)

    def accumulate_(
        self, state: State, module: nn.Module, a: Tensor, w: Tensor, keep: float, gain: float
    ) -> None:
        shift = state[self.weight].get("shift")
        a = _cast(a, w) if shift is None else _cast(a, w) - shift
        super().accumulate_(state, module, a, w, keep, gain)

    def tidy_(self, state: State) -> None:
        m00, m0i, _ = self.kept(state)
        assert m00 is not None and m0i is not None
        if "shift" in state[self.weight]:
            total = m00.sum()
            self._move(state, torch.where(total > 0, m0i.sum(0) / total, 0.0))
        super().tidy_(state)

    def _move(self, state: State, move: Tensor) -> None:
        """Measure the moments from ``move`` further on."""
        kept = self.kept(state)
        for old, new in zip(kept, recentre(kept, move)):
            old.copy_(new)  # type: ignore[union-attr]
        state[self.weight]["shift"].add_(move)

    def solve(
        self, state: State, gradients: list[Tensor], eps: float, floor: float | None
    ) -> list[Tensor]:
        m00, m0i, mii = self.kept(state)
        assert m00 is not None and m0i is not None and mii is not None
        v0, vi = gradients
        w0, wi = reductions.quasi_diagonal(
            m00,
            self.adapter.rows(self.module, m0i),
            self.adapter.rows(self.module, mii),
            v0,
            self.adapter.rows(self.module, vi),
            eps=eps,
            floor=floor,
            shift=state[self.weight].get("shift"),
        )
        return [w0, self.adapter.unrows(self.module, wi, self.weight.shape)]


class UnitwiseBlock(DiagonalBlock):
    """Keeps the full block of each unit, ``state[weight]["block"]: [units, 1 + n, 1 + n]``."""

    weight: nn.Parameter

    def start(self, state: State, a: Tensor, dtype: torch.dtype, identity: bool) -> None:
        rows = self.adapter.rows(self.module, self.weight)
        size = rows.shape[1] + (self.bias is not None)
        eye = float(identity) * torch.eye(size, dtype=dtype, device=rows.device)
        state[self.home]["updates"] = 0
        state[self.weight]["block"] = eye.repeat(rows.shape[0], 1, 1)

    def moments(self, state: State) -> Moments:
        block, shape = state[self.weight]["block"], self.weight.shape
        diagonal = block.diagonal(dim1=1, dim2=2)
        if self.bias is None:
            return Moments(None, None, self._unrows(diagonal))
        return Moments(diagonal[:, 0], self._unrows(block[:, 0, 1:]), self._unrows(diagonal[:, 1:]))

    def accumulate_(
        self, state: State, module: nn.Module, a: Tensor, w: Tensor, keep: float, gain: float
    ) -> None:
        inputs, units = _adapter(module).patches(module, _cast(a, w), w)
        if self.bias is not None:
            inputs = torch.cat([torch.ones_like(inputs[:, :1]), inputs], dim=1)
        block = torch.einsum("nk,ni,nj->kij", units, inputs, inputs)
        state[self.weight]["block"].mul_(keep).add_(block, alpha=gain)

    def tidy_(self, state: State) -> None:
        block = state[self.weight]["block"]
        block.masked_fill_(block.abs() < smallest(block.dtype), 0.0)

    def solve(
        self, state: State, gradients: list[Tensor], eps: float, floor: float | None
    ) -> list[Tensor]:
        rows = self.adapter.rows(self.module, gradients[-1])
        v = rows if self.bias is None else torch.cat([gradients[0].unsqueeze(1), rows], dim=1)
        w = reductions.unitwise(state[self.weight]["block"], v, eps=eps, floor=floor)
        return [self._unrows(w)] if self.bias is None else [w[:, 0], self._unrows(w[:, 1:])]

    def _unrows(self, rows: Tensor) -> Tensor:
        return self.adapter.unrows(self.module, rows.contiguous(), self.weight.shape)


def _adapter(module: nn.Module) -> Adapter:
    adapter = adapter_of(module)
    assert adapter is not None
    return adapter


def _cast(a: Tensor, w: Tensor) -> Tensor:
    return a.to(w.dtype) if a.is_floating_point() else a


REDUCTIONS: dict[str, type[DiagonalBlock]] = {
    "quasi-diagonal": QuasiDiagonalBlock,
    "diagonal": DiagonalBlock,
    "unitwise": UnitwiseBlock,
}


def find_blocks(
    model: nn.Module, trained: Iterable[Tensor], reduction: str
) -> tuple[list[DiagonalBlock], dict[nn.Module, DiagonalBlock]]:
    """The blocks of a model, and which of them each watched layer feeds.

    A weight that several layers share has one block, fed by all of them; a bias row needs one bias, so where they
    disagree on it the block is diagonal.
    """
    wanted, blocks, owner = set(trained), [], {}
    by_weight: dict[Tensor, DiagonalBlock] = {}
    for name, module in model.named_modules():
        adapter = adapter_of(module)
        if adapter is None:
            continue
        weight, bias = _own(module, adapter.weight, wanted), _own(module, adapter.bias, wanted)
        if weight is not None and weight in by_weight:
            block = owner[module] = by_weight[weight]
            if bias is not block.bias:
                raise ValueError(
                    f"{name} shares its weight with {block.name} but not its bias: share both, or neither"
                )
            continue
        if weight is None and bias is None:
            continue
        kind = REDUCTIONS[reduction]
        if weight is None or (bias is None and kind is QuasiDiagonalBlock):
            kind = DiagonalBlock
        block = kind(name or type(module).__name__, module, adapter, weight, bias)
        blocks.append(block)
        owner[module] = block
        if weight is not None:
            by_weight[weight] = block
    return blocks, owner


def _own(module: nn.Module, name: str | None, wanted: set[Tensor]) -> nn.Parameter | None:
    parameter = None if name is None else getattr(module, name, None)
    return parameter if isinstance(parameter, nn.Parameter) and parameter in wanted else None
