"""Lookup tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quasidiag.layers.base import Adapter, need_batch, register_layer
from quasidiag.moments import Moments


@register_layer(nn.Embedding)
class EmbeddingAdapter(Adapter):
    r"""A dense layer without bias on one-hot inputs, so the moments are :math:`m_{vd} = ‹\sum_{s: t_s = v} δ_d^2›`.

    ``padding_idx`` gets no gradient and no metric. With ``scale_grad_by_freq`` the gradient of a token is divided by
    its count in the minibatch, which is no sum over samples: the metric is then that of the plain gradient.
    """

    full = False

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return need_batch(module, args[0], 1)

    def square(self, a: Tensor) -> Tensor:
        return a

    def rows(self, module: nn.Module, weight: Tensor) -> Tensor:
        return weight.T

    def unrows(self, module: nn.Module, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.T

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        table = torch.zeros(module.weight.shape, dtype=g.dtype, device=g.device)
        return self._add_(module, table, a, g, 1.0)

    def accumulate_(
        self, module: nn.Module, into: Moments, a: Tensor, w: Tensor, keep: float, gain: float
    ) -> None:
        if into.mii is not None:
            self._add_(module, into.mii.mul_(keep), a, w, gain)

    def _add_(
        self, module: nn.Module, table: Tensor, tokens: Tensor, g: Tensor, gain: float
    ) -> Tensor:
        assert isinstance(module, nn.Embedding)
        tokens, g = tokens.flatten(), g.reshape(-1, g.shape[-1])
        if module.padding_idx is not None:
            g = torch.where((tokens != module.padding_idx).unsqueeze(1), g, 0.0)
        return table.index_add_(0, tokens, g, alpha=gain)
