"""Convolutions of any geometry: the three gradients of a layer, by hypothesis, float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import CLOSE
from torch import Tensor, nn

from quasidiag.layers import adapter_of

PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    groups, kernel, stride, dilation = draw(st.integers(1, 3)), each(1, 3), each(1, 3), each(1, 2)
    padding, size = each(0, 2), each(1, 5)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation))
        options["output_padding"] = extra
    else:
        mode = draw(st.sampled_from(["zeros", "circular", "replicate", "reflect"]))
        options["padding_mode"] = mode
        limit = {"zeros": 9, "replicate": 9, "circular": 0, "reflect": -1}[mode]
        assume(all(p <= max(0, n + limit) for p, n in zip(padding, size)))
        assume(mode != "reflect" or all(p < n for p, n in zip(padding, size)))
    channels = [groups * draw(st.integers(1, 2)) for _ in range(2)]
    kind = (TRANSPOSED if transposed else PLAIN)[dims]
    layer = kind(*channels, kernel, bias=True, **options)
    x = torch.randn(2, channels[0], *size)
    try:
        layer(x)
    except RuntimeError:
        assume(False)  # torch itself finds the geometry impossible
    return layer, x


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=120, deadline=None, derandomize=True)
@given(layers())
def test_gradients_and_patches(case: tuple[nn.Module, Tensor]) -> None:
    layer, x = case
    adapter = adapter_of(layer)
    assert adapter is not None
    y = layer(x)
    g = torch.randn_like(y)
    weight, bias = torch.autograd.grad(y, [layer.weight, layer.bias], g)
    torch.testing.assert_close(adapter.weight_grad(layer, x, g), weight, **CLOSE)
    torch.testing.assert_close(adapter.bias_grad(layer, g), bias, **CLOSE)

    rows = adapter.rows(layer, layer.weight.detach())
    assert rows.shape[0] == layer.out_channels
    assert torch.equal(adapter.unrows(layer, rows, layer.weight.shape), layer.weight)
    inputs, units = adapter.patches(layer, x, g)
    by_patches = torch.einsum("nsgu,nsgi->gui", units, inputs).flatten(0, 1)
    torch.testing.assert_close(adapter.unrows(layer, by_patches, weight.shape), weight, **CLOSE)

    # What a unit sees at a position, times its weights, is its pre-activation there.
    by_group = rows.view(layer.groups, -1, rows.shape[1])
    z = torch.einsum("nsgi,gui->nsgu", inputs, by_group).flatten(2) + layer.bias
    torch.testing.assert_close(z.transpose(1, 2).reshape(y.shape), y, **CLOSE)
