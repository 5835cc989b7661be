"""Bilinear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quasidiag.layers.base import Adapter, need_batch, register_layer


@register_layer(nn.Bilinear)
class BilinearAdapter(Adapter):
    r""":math:`y_k = x_1^⊤ W_k x_2 + b_k`: the inputs of a unit are the products :math:`x_{1i} x_{2j}`.

    The two inputs are kept side by side; their products are formed only within a gradient.
    """

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return torch.cat([need_batch(module, x, 2) for x in args[:2]], dim=-1)

    def _both(self, module: nn.Module, a: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(module, nn.Bilinear)
        x1, x2 = a.split([module.in1_features, module.in2_features], dim=-1)
        return x1, x2

    def mixes(self, module: nn.Module) -> bool:
        return True

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        x1, x2 = self._both(module, a.flatten(0, -2))
        return torch.einsum("nk,ni,nj->kij", g.flatten(0, -2), x1, x2)

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        x1, x2 = self._both(module, a)
        products = (x1.unsqueeze(-1) * x2.unsqueeze(-2)).flatten(-2)
        n = len(a)
        return products.reshape(n, -1, 1, products.shape[-1]), g.reshape(n, -1, 1, g.shape[-1])
