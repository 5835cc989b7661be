"""Dense layers whose weight is stored as ``[inputs, units]``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quasidiag.layers.base import Adapter, register_layer
from quasidiag.layers.linear import LinearAdapter


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedAdapter(LinearAdapter):
    """A dense layer of Hugging Face's GPT-2, which is called a convolution; inputs are ``[batch, ..., features]``."""

    shiftable = (
        False  # moments are stored as the weight is, and a shift wants them as [units, inputs]
    )
    accumulate_ = Adapter.accumulate_

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        return super().weight_grad(module, a, g).T

    def rows(self, module: nn.Module, weight: Tensor) -> Tensor:
        return weight.T

    def unrows(self, module: nn.Module, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.T.contiguous()
