"""Dense layers whose weight is stored as ``[inputs, units]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quasidiag.layers.base import Adapter, need_batch, register_layer


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedAdapter(Adapter):
    """A dense layer of Hugging Face's GPT-2, which is called a convolution; inputs are ``[batch, ..., features]``."""

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return need_batch(module, args[0], 2)

    def mixes(self, module: nn.Module) -> bool:
        return True

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        return a.flatten(0, -2).T @ g.flatten(0, -2)

    def rows(self, module: nn.Module, weight: Tensor) -> Tensor:
        return weight.T

    def unrows(self, module: nn.Module, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.T.contiguous()

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        n = a.shape[0]
        return a.reshape(n, -1, 1, a.shape[-1]), g.reshape(n, -1, 1, g.shape[-1])
