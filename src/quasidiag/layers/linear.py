"""Dense layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quasidiag.layers.base import Adapter, need_batch, register_layer
from quasidiag.moments import Moments


@register_layer(nn.Linear)
class LinearAdapter(Adapter):
    """A dense layer; inputs are ``[batch, ..., features]``."""

    shiftable = True

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return need_batch(module, args[0], 2)

    def mixes(self, module: nn.Module) -> bool:
        return True

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        return g.flatten(0, -2).T @ a.flatten(0, -2)

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        n = a.shape[0]
        return a.reshape(n, -1, 1, a.shape[-1]), g.reshape(n, -1, 1, g.shape[-1])

    def accumulate_(
        self, module: nn.Module, into: Moments, a: Tensor, w: Tensor, keep: float, gain: float
    ) -> None:
        a, w = a.flatten(0, -2), w.flatten(0, -2)
        if into.m00 is not None:
            into.m00.mul_(keep).add_(w.sum(0), alpha=gain)
        if into.m0i is not None:
            into.m0i.addmm_(w.T, a, beta=keep, alpha=gain)
        if into.mii is not None:
            into.mii.addmm_(w.T, a.square(), beta=keep, alpha=gain)
