r"""Normalisations: every channel is a unit with one input, the normalised activity :math:`\hat x`.

.. math:: y = γ \hat x + β, \qquad m_{00} = ‹δ^2›,\ m_{0i} = ‹δ^2 \hat x›,\ m_{ii} = ‹δ^2 \hat x^2›.

A unit has one weight, so the quasi-diagonal block is the full one. :math:`\hat x` is computed when the moments are,
from the input that autograd keeps anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quasidiag.layers.base import Adapter, need_batch, register_layer
from quasidiag.moments import Moments


class NormAdapter(Adapter, ABC):
    """What the normalisations have in common; a subclass gives :meth:`normalise` and :meth:`channels`."""

    full = False
    normalises = True

    @abstractmethod
    def normalise(self, module: Any, x: Tensor) -> Tensor:
        """The normalised input, without weight and bias."""

    @abstractmethod
    def channels(self, module: Any, x: Tensor) -> Tensor:
        """``[N, S, *channels]``, with the channels in the weight's shape."""

    def rows(self, module: nn.Module, weight: Tensor) -> Tensor:
        return weight.reshape(-1, 1)

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        x = self.channels(module, self.normalise(module, a))
        return (x * self.channels(module, g)).sum((0, 1))

    def bias_grad(self, module: nn.Module, g: Tensor) -> Tensor:
        return self.channels(module, g).sum((0, 1))

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        x, g = self.channels(module, self.normalise(module, a)), self.channels(module, g)
        return x.flatten(2).unsqueeze(-1), g.flatten(2).unsqueeze(-1)

    def accumulate_(
        self, module: nn.Module, into: Moments, a: Tensor, w: Tensor, keep: float, gain: float
    ) -> None:
        w = self.channels(module, w)
        if into.m00 is not None:
            into.m00.mul_(keep).add_(w.sum((0, 1)), alpha=gain)
        if into.mii is not None:
            x = self.channels(module, self.normalise(module, a))
            wx = w * x
            if into.m0i is not None:
                into.m0i.mul_(keep).add_(wx.sum((0, 1)), alpha=gain)
            into.mii.mul_(keep).add_((wx * x).sum((0, 1)), alpha=gain)


@register_layer(nn.LayerNorm)
class LayerNormAdapter(NormAdapter):
    """Normalises over the trailing dimensions; dimensions between the batch and these are shared positions."""

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return need_batch(module, args[0], 1 + len(module.normalized_shape))  # type: ignore[arg-type]

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)

    def channels(self, module: Any, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, *module.normalized_shape)


@register_layer(nn.RMSNorm)
class RMSNormAdapter(LayerNormAdapter):
    """As :class:`LayerNormAdapter`; it has no bias, so its blocks are diagonal."""

    bias = None

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)


class _ChannelsSecond(NormAdapter):
    def channels(self, module: Any, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2) if x.dim() > 2 else x.unsqueeze(1)


@register_layer(nn.GroupNorm)
class GroupNormAdapter(_ChannelsSecond):
    """Channels are the second dimension; dimensions after it are shared positions."""

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return need_batch(module, args[0], 2)

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)


@register_layer(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormAdapter(_ChannelsSecond):
    """Channels are the second dimension; dimensions after it are shared positions. For ``affine=True``."""

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        dims = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}
        wanted = next(d for kind, d in dims.items() if isinstance(module, kind))
        return need_batch(module, args[0], wanted)

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        own = module.training or not module.track_running_stats
        mean, var = (None, None) if own else (module.running_mean, module.running_var)
        return F.instance_norm(x, mean, var, use_input_stats=own, eps=module.eps)


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormAdapter(_ChannelsSecond):
    r"""Channels are the second dimension; dimensions after it are shared positions.

    In training mode :math:`\hat x_n` depends on every sample of the minibatch, so a sample has no gradient of its own:
    the loss of one moves with the inputs of all. The metric takes :math:`\hat x` and ``delta`` as the ordinary backward
    pass has them. For the layer's own γ and β that is the derivative of each sample's loss with the statistics held
    fixed, and exact if no normalisation over the batch follows. For the layers below, ``delta`` of a sample is the
    derivative of the *whole minibatch's* loss by this sample's pre-activation, through the shared statistics too: the
    terms across samples are of relative order 1/N, and the gradient has the same ones.

    The normalised input is kept from the forward pass: it cannot be computed later from a part of the minibatch.
    """

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        x: Tensor = need_batch(module, args[0].detach(), 2)
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        if module.training or module.running_mean is None:
            return F.batch_norm(x, None, None, training=True, eps=module.eps)
        return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        return x
