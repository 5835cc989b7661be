r"""Convolutions and their transposes, in one to three dimensions.

The moments are the convolution's own weight gradient at ``(a², w)`` and ``(a, w)``, so no patch is ever unfolded for
them. A unit is an output channel; with ``groups`` it sees the channels of its own group only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from quasidiag.layers.base import Adapter, need_batch, register_layer


class _Convolution(Adapter, ABC):
    transposed = False

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        return need_batch(module, args[0], module.weight.dim())  # type: ignore[operator]

    def mixes(self, module: nn.Module) -> bool:
        assert isinstance(module, _ConvNd)
        return module.groups == 1

    def bias_grad(self, module: nn.Module, g: Tensor) -> Tensor:
        return g.flatten(2).sum((0, 2))

    @abstractmethod
    def _geometry(
        self, module: _ConvNd, a: Tensor, g: Tensor
    ) -> tuple[Tensor, list[int], list[int]]:
        """The input as the bare convolution sees it, its padding, and its output padding."""

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        assert isinstance(module, _ConvNd)
        a, padding, output_padding = self._geometry(module, a, g)
        weight = g.new_empty(module.weight.shape)  # only its shape matters
        return torch.ops.aten.convolution_backward(
            g.contiguous(),
            a,
            weight,
            None,
            list(module.stride),
            padding,
            list(module.dilation),
            self.transposed,
            output_padding,
            module.groups,
            [False, True, False],
        )[1]


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvAdapter(_Convolution):
    """Convolutions with any stride, padding, padding mode, dilation and groups."""

    def _geometry(
        self, module: _ConvNd, a: Tensor, g: Tensor
    ) -> tuple[Tensor, list[int], list[int]]:
        zeros = [0] * len(module.kernel_size)
        if module.padding_mode == "zeros" and not isinstance(module.padding, str):
            return a, list(module.padding), zeros
        return _pad(module, a), zeros, zeros

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(module, _ConvNd)
        windows = _windows(_pad(module, a), module.kernel_size, module.stride, module.dilation)
        return _grouped(module, windows, g)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeAdapter(_Convolution):
    """Transposed convolutions. Weights are stored inputs first, ``[in, out/groups, ...]``; a unit is an output channel."""

    transposed = True

    def rows(self, module: nn.Module, weight: Tensor) -> Tensor:
        inputs, outputs = weight.shape[:2]
        groups: int = module.groups  # type: ignore[assignment]
        by_group = weight.reshape(groups, inputs // groups, outputs, -1)
        return by_group.transpose(1, 2).reshape(groups * outputs, -1)

    def unrows(self, module: nn.Module, rows: Tensor, shape: torch.Size) -> Tensor:
        groups: int = module.groups  # type: ignore[assignment]
        by_group = rows.reshape(groups, shape[1], shape[0] // groups, -1)
        return by_group.transpose(1, 2).reshape(shape)

    def _geometry(
        self, module: _ConvNd, a: Tensor, g: Tensor
    ) -> tuple[Tensor, list[int], list[int]]:
        return a, list(module.padding), self._output_padding(module, a, g)  # type: ignore[arg-type]

    def _output_padding(self, module: _ConvNd, a: Tensor, g: Tensor) -> list[int]:
        """The output padding, from the shapes, because the caller may have asked for an ``output_size``."""
        return [
            large - ((small - 1) * s - 2 * int(p) + d * (k - 1) + 1)
            for large, small, s, p, d, k in zip(
                g.shape[2:],
                a.shape[2:],
                module.stride,
                module.padding,
                module.dilation,
                module.kernel_size,
            )
        ]

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        r"""Those of the equivalent plain convolution: of the input, spread out by the stride, with the flipped kernel."""
        assert isinstance(module, _ConvNd)
        sizes = [(n - 1) * s + 1 for n, s in zip(a.shape[2:], module.stride)]
        spread = a.new_zeros(*a.shape[:2], *sizes)
        spread[(slice(None), slice(None), *(slice(None, None, s) for s in module.stride))] = a
        margins: list[int] = []
        extra = self._output_padding(module, a, g)
        for p, d, k, more in zip(module.padding, module.dilation, module.kernel_size, extra):
            margin = d * (k - 1) - int(p)  # type: ignore[call-overload]
            margins = [margin, margin + more, *margins]
        ones = (1,) * len(sizes)
        windows = _windows(F.pad(spread, margins), module.kernel_size, ones, module.dilation)
        return _grouped(module, windows.flip(list(range(-len(sizes), 0))), g)


def _pad(module: _ConvNd, a: Tensor) -> Tensor:
    margins: list[int] = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, margins, mode=mode)


def _windows(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """What the kernel covers at each position: ``[N, C, *positions, *kernel]``."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation), start=2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
    return x


def _grouped(module: _ConvNd, windows: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, S, G, I]`` and ``[N, S, G, U]`` of windows and gradients with the channels second."""
    n, groups, dims = len(g), module.groups, len(module.kernel_size)
    by_group = windows.unflatten(1, (groups, -1)).movedim(
        tuple(range(3, 3 + dims)), tuple(range(1, 1 + dims))
    )
    positions = g[0, 0].numel()
    inputs = by_group.reshape(n, positions, groups, -1)
    return inputs, g.reshape(n, groups, -1, positions).permute(0, 3, 1, 2)
