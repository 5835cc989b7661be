# mypy: disable-error-code="no-untyped-def"
"""The GPU kernels of a direction: gradients into the coordinates of the metric, and directions back from there.

:func:`quasidiag.auto.orthogonal.newton_schulz` works on matrices in bfloat16, many in one tensor, with zeros around them.
One kernel writes a layer's coordinates right there, the other reads what has become of them: one pass over memory each.
As ``kernels.fused``, this is imported only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasidiag.kernels.fused import on
from quasidiag.kernels.wanted import Place, Wanted


@triton.jit
def _coordinates(
    v0, vi, bias, mean, scale, room, n, units, size, groups, first, matrix, row, column,
    BIAS: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``root.Root.gradient`` of one unit."""
    k = tl.program_id(0).to(tl.int64)
    unit = k % units
    to = room + (first + k // units * groups + unit // size) * matrix + unit % size * row
    by = 0.0
    if BIAS:
        by = tl.load(v0 + k)
        tl.store(to, (by * tl.load(bias + k)).to(room.dtype.element_ty))
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        mask = at < n
        x = tl.load(vi + k * n + at, mask=mask, other=0.0)
        if MEAN:
            x -= by * tl.load(mean + k * n + at, mask=mask, other=0.0)
        x *= tl.load(scale + k * n + at, mask=mask, other=0.0)
        tl.store(to + (at + BIAS).to(tl.int64) * column, x.to(room.dtype.element_ty), mask=mask)


@triton.jit
def _step(
    room, bias, mean, scale, w0, wi, n, units, size, groups, first, matrix, row, column, shortest, by,
    BIAS: tl.constexpr, MEAN: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``root.Root.step`` of one unit, which is first divided by its length, or by ``shortest`` if that is larger."""
    k = tl.program_id(0).to(tl.int64)
    unit = k % units
    u = room + (first + k // units * groups + unit // size) * matrix + unit % size * row
    if LENGTH:
        squares = tl.zeros([BLOCK], tl.float32)
        for i in range(0, n + BIAS, BLOCK):
            at = i + tl.arange(0, BLOCK)
            x = tl.load(u + at.to(tl.int64) * column, mask=at < n + BIAS, other=0.0).to(tl.float32)
            squares += x * x
        by /= tl.maximum(tl.sqrt(tl.sum(squares, 0)), shortest)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        mask = at < n
        x = tl.load(u + (at + BIAS).to(tl.int64) * column, mask=mask, other=0.0).to(tl.float32)
        w = by * x * tl.load(scale + k * n + at, mask=mask, other=0.0)
        tl.store(wi + k * n + at, w, mask=mask)
        if MEAN:
            total += w * tl.load(mean + k * n + at, mask=mask, other=0.0)
    if BIAS:
        w = by * tl.load(u).to(tl.float32) * tl.load(bias + k)
        tl.store(w0 + k, w - tl.sum(total, 0))


def turn_(wanted: Wanted, place: Place) -> None:
    """Write the coordinates of layers' gradients into their place."""
    bias, mean, scale = wanted.root
    _launch(_coordinates, wanted, place, [wanted.v[0], wanted.v[-1], bias, mean, scale, place.room])


def turn_back(wanted: Wanted, place: Place) -> list[Tensor]:
    """The steps of layers from the coordinates in their place, as :class:`Wanted` says."""
    steps = [torch.empty_like(v) for v in wanted.v]
    given = [place.room, *wanted.root, steps[0], steps[-1]]
    _launch(_step, wanted, place, given, wanted.shortest, wanted.by, LENGTH=wanted.shortest > 0)
    return steps


def _launch(kernel, wanted: Wanted, place: Place, tensors, *numbers: float, **constants: bool):
    bias, mean, scale = wanted.root
    assert scale is not None
    layers, units, n = scale.shape
    strides = place.room.stride()
    turned = (strides[0], strides[2], strides[1]) if place.turned else strides
    block = max(16, min(triton.next_power_of_2(n), 1024))
    with on(scale):
        kernel[(layers * units,)](
            *(scale if t is None else t for t in tensors),
            *(n, units, -(-units // wanted.groups), wanted.groups, place.first, *turned, *numbers),
            **constants,
            BIAS=bias is not None,
            MEAN=mean is not None,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
