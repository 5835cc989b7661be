# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM108 (a branch that is taken when the kernel is compiled)
"""The GPU kernels of a step, each one pass over memory: Triton kernels and their launchers.

Imported only where Triton is installed (see ``kernels.gpu``). Arithmetic is in float32 throughout; the products of
half-precision activities are taken by the tensor cores with float32 sums. Nothing waits for the device, so a step can
be captured in a CUDA graph. Under ``TRITON_INTERPRET=1`` the kernels run on a CPU, which is how they are tested
without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasidiag.kernels.rule import Rule
from quasidiag.moments import Moments, smallest


@triton.jit
def _apply(
    w, offsets, mask, buffer, theta, lr, decay, momentum, BUFFER: tl.constexpr, THETA: tl.constexpr
):
    """``buffer ← momentum·buffer + w``, ``θ ← decay·θ - lr·buffer``."""
    if BUFFER:
        w += momentum * tl.load(buffer + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(buffer + offsets, w, mask=mask)
    if THETA:
        old = tl.load(theta + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(theta + offsets, decay * old - lr * w, mask=mask)


@triton.jit
def _quasi_diagonal(
    m00, m0i, mii, v0, vi, shift, n, lr, decay, momentum, eps, floor, scale, unit,
    w0, wi, buffer0, bufferi, theta0, thetai,
    SHIFT: tl.constexpr, W: tl.constexpr, BUFFER: tl.constexpr, THETA: tl.constexpr,
    LR_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """reductions.quasi_diagonal of one unit, then the step. One pass is enough: only the bias needs a sum over the row."""
    k = tl.program_id(0)
    start = k.to(tl.int64) * n
    if LR_TENSOR:
        rate = tl.load(lr).to(tl.float32)
    else:
        rate = lr
    zeroth = tl.load(m00 + k)
    d0 = zeroth + eps
    inverse0 = tl.where(d0 > 0, 1.0 / d0, 0.0)
    g0 = scale * tl.load(v0 + k).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        column = i + tl.arange(0, BLOCK)
        mask = column < n
        offsets = start + column
        row = tl.load(m0i + offsets, mask=mask, other=0.0)
        second = tl.load(mii + offsets, mask=mask, other=0.0)
        centred = scale * tl.load(vi + offsets, mask=mask, other=0.0).to(tl.float32)
        diagonal = second + eps
        if SHIFT:
            c = tl.load(shift + column, mask=mask, other=0.0)
            row -= eps * c
            diagonal += eps * c * c
            centred -= c * g0
        mu = row * inverse0
        variance = diagonal - mu * row
        alive = (variance > unit * diagonal) & mask
        if SHIFT:
            alive = alive & (second > zeroth * (unit * c) * (unit * c))
        least = tl.maximum(variance, floor * inverse0)
        w = tl.where(alive, (centred - mu * g0) / tl.where(alive, least, 1.0), 0.0)
        if SHIFT:
            total += (row + d0 * c) * w
        else:
            total += row * w
        if W:
            tl.store(wi + offsets, w, mask=mask)
        _apply(w, offsets, mask, bufferi, thetai, rate, decay, momentum, BUFFER, THETA)
    bias = (g0 - tl.sum(total, 0)) * inverse0
    if W:
        tl.store(w0 + k, bias)
    _apply(bias, k, k >= 0, buffer0, theta0, rate, decay, momentum, BUFFER, THETA)


@triton.jit
def _diagonal(
    m, v, n, lr, decay, momentum, eps, floor, scale, w_out, buffer, theta,
    W: tl.constexpr, BUFFER: tl.constexpr, THETA: tl.constexpr, LR_TENSOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """reductions.diagonal, then the step."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if LR_TENSOR:
        rate = tl.load(lr).to(tl.float32)
    else:
        rate = lr
    d = tl.maximum(tl.load(m + offsets, mask=mask, other=0.0) + eps, floor)
    g = scale * tl.load(v + offsets, mask=mask, other=0.0).to(tl.float32)
    w = tl.where(d > 0, g / tl.where(d > 0, d, 1.0), 0.0)
    if W:
        tl.store(w_out + offsets, w, mask=mask)
    _apply(w, offsets, mask, buffer, theta, rate, decay, momentum, BUFFER, THETA)


@triton.jit
def _square(
    delta, scale, least, out, n, SCALE_TENSOR: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """moments.square."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if SCALE_TENSOR:
        factor = tl.load(scale).to(tl.float32)
    else:
        factor = scale
    d = factor * tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    w = tl.where(d * d < least, 0.0, d * d)
    if ADD:
        w += tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, w, mask=mask)


@triton.jit
def _centre(
    a, shift, gain, centred, squared, n,
    SHIFT: tl.constexpr, CENTRED: tl.constexpr, GAIN_TENSOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``gain·(a - c)``, where it is wanted, and ``gain·(a - c)²`` of one sample."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    offsets = tl.program_id(0).to(tl.int64) * n + column
    if GAIN_TENSOR:
        factor = tl.load(gain).to(tl.float32)
    else:
        factor = gain
    x = tl.load(a + offsets, mask=mask, other=0.0).to(tl.float32)
    if SHIFT:
        x -= tl.load(shift + column, mask=mask, other=0.0)
    if CENTRED:
        tl.store(centred + offsets, factor * x, mask=mask)
    tl.store(squared + offsets, factor * x * x, mask=mask)


@triton.jit
def _products(
    a, w, shift, m00, m0i, mii, rows, n, units, keep, gain,
    SHIFT: tl.constexpr, GAIN_TENSOR: tl.constexpr,
    UNITS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All moments of a tile at once: ``a`` and ``w`` are read once, and ``a`` is squared in registers.

    Each float32 product is computed as three products on the tensor cores (``tf32x3``), which together are as exact.
    """
    u = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    i = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    s = tl.arange(0, ROWS)
    if SHIFT:
        c = tl.load(shift + i, mask=i < n, other=0.0)[None, :]
    zeroth = tl.zeros([UNITS], tl.float32)
    first = tl.zeros([UNITS, INPUTS], tl.float32)
    second = tl.zeros([UNITS, INPUTS], tl.float32)
    for start in range(0, rows, ROWS):
        there = (start + s < rows)[:, None]
        at = (start + s).to(tl.int64)[:, None]
        weights = tl.load(w + at * units + u[None, :], mask=there & (u < units)[None, :], other=0.0)
        x = tl.load(a + at * n + i[None, :], mask=there & (i < n)[None, :], other=0.0)
        if SHIFT:
            x -= c
        turned = tl.trans(weights)
        zeroth += tl.sum(weights, 0)
        first = tl.dot(turned, x, first, input_precision="tf32x3")
        second = tl.dot(turned, x * x, second, input_precision="tf32x3")
    if GAIN_TENSOR:
        factor = tl.load(gain).to(tl.float32)
    else:
        factor = gain
    offsets = u.to(tl.int64)[:, None] * n + i[None, :]
    mask = (u < units)[:, None] & (i < n)[None, :]
    once = u + tl.program_id(1) * units < units  # only the first column of programs writes m00
    old = tl.load(m00 + u, mask=once, other=0.0)
    tl.store(m00 + u, keep * old + factor * zeroth, mask=once)
    old = tl.load(m0i + offsets, mask=mask, other=0.0)
    tl.store(m0i + offsets, keep * old + factor * first, mask=mask)
    old = tl.load(mii + offsets, mask=mask, other=0.0)
    tl.store(mii + offsets, keep * old + factor * second, mask=mask)


def quasi_diagonal(
    m00: Tensor,
    m0i: Tensor,
    mii: Tensor,
    v0: Tensor,
    vi: Tensor,
    shift: Tensor | None,
    rule: Rule,
    w: Sequence[Tensor] | None,
    buffers: Sequence[Tensor] | None,
    thetas: Sequence[Tensor] | None,
) -> None:
    """Solve (``reductions.quasi_diagonal``), and write ``w``, update momentum ``buffers``, move ``thetas``, if given."""
    rows, n = mii.shape
    block = max(16, min(triton.next_power_of_2(n), 1024))
    outputs = [t for pair in (w, buffers, thetas) for t in (pair or (m00, m00))]
    with on(mii):
        _quasi_diagonal[(rows,)](
            *(m00, m0i, mii, v0, vi, m00 if shift is None else shift, n, *rule),
            *(8 * torch.finfo(torch.float32).eps, *outputs),
            SHIFT=shift is not None,
            W=w is not None,
            BUFFER=buffers is not None,
            THETA=thetas is not None,
            LR_TENSOR=isinstance(rule.lr, Tensor),
            BLOCK=block,
            num_warps=max(1, block // 128),
        )


def diagonal(
    moments: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rule: Rule,
    w: Sequence[Tensor] | None,
    buffers: Sequence[Tensor] | None,
    thetas: Sequence[Tensor] | None,
) -> None:
    """As :func:`quasi_diagonal`, for the diagonal reduction of several parameters."""
    lists = [moments, gradients, *(x or moments for x in (w, buffers, thetas))]
    for m, v, *outputs in zip(*lists):
        with on(m):
            _diagonal[(triton.cdiv(m.numel(), 1024),)](
                *(m, v, m.numel(), *rule, *outputs),
                W=w is not None,
                BUFFER=buffers is not None,
                THETA=thetas is not None,
                LR_TENSOR=isinstance(rule.lr, Tensor),
                BLOCK=1024,
            )


def square(delta: Tensor, scale: float | Tensor, onto: Tensor | None) -> Tensor:
    """``(scale·delta)²``, added to ``onto`` if given; of half-precision derivatives in bfloat16, with float32's range."""
    half = delta.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.bfloat16 if half else torch.float32
    out = torch.empty_like(delta, dtype=dtype) if onto is None else onto
    with on(delta):
        _square[(triton.cdiv(delta.numel(), 2048),)](
            *(delta, scale, smallest(torch.float32), out, delta.numel()),
            SCALE_TENSOR=isinstance(scale, Tensor),
            ADD=onto is not None,
            BLOCK=2048,
        )
    return out


#: Float32 products of fewer multiplications than this go through one kernel of our own, larger ones through cuBLAS.
SMALL = 2**30


def accumulate_(
    into: Moments, a: Tensor, w: Tensor, shift: Tensor | None, keep: float, gain: float | Tensor
) -> None:
    """``into ← keep·into + gain·moments(a - shift, w)`` of a dense layer.

    Where launches and passes over memory cost more than the products, one kernel of our own does it all. Elsewhere cuBLAS
    computes the products, at nearly twice the speed, with the old moments as its accumulator.
    """
    exact = torch.get_float32_matmul_precision() == "highest" and w.dtype == torch.float32
    if exact and into.m0i is not None and a.numel() * w.shape[1] < SMALL:
        _accumulate_small_(into, a, w, shift, keep, gain)
    else:
        _accumulate_large_(into, a, w, shift, keep, gain)


def _accumulate_small_(
    into: Moments, a: Tensor, w: Tensor, shift: Tensor | None, keep: float, gain: float | Tensor
) -> None:
    (rows, n), units = a.shape, w.shape[1]
    with on(a):
        _products[(triton.cdiv(units, 32), triton.cdiv(n, 64))](
            *(a, w, a if shift is None else shift, *into, rows, n, units, keep, gain),
            SHIFT=shift is not None,
            GAIN_TENSOR=isinstance(gain, Tensor),
            UNITS=32,
            INPUTS=64,
            ROWS=64,
            num_warps=4,
            num_stages=3,
        )


def _accumulate_large_(
    into: Moments, a: Tensor, w: Tensor, shift: Tensor | None, keep: float, gain: float | Tensor
) -> None:
    rows, n = a.shape
    squared = torch.empty_like(a, dtype=w.dtype)
    centred = squared if into.m0i is None else torch.empty_like(squared)
    block = min(triton.next_power_of_2(n), 1024)
    with on(a):
        _centre[(rows, triton.cdiv(n, block))](
            *(a, a if shift is None else shift, gain, centred, squared, n),
            SHIFT=shift is not None,
            CENTRED=into.m0i is not None,
            GAIN_TENSOR=isinstance(gain, Tensor),
            BLOCK=block,
        )
    if into.m00 is not None:
        into.m00.mul_(keep).add_(w.sum(0, dtype=into.m00.dtype) * gain)
    for moment, x in ((into.m0i, centred), (into.mii, squared)):
        if moment is None:
            continue
        if w.dtype == moment.dtype:
            moment.addmm_(w.T, x, beta=keep)
        else:
            torch.ops.aten.addmm.dtype_out(
                moment, w.T, x, moment.dtype, beta=keep, alpha=1.0, out=moment
            )


def on(tensor: Tensor) -> torch.cuda.device:
    """A context that launches kernels on the tensor's device (on a CPU, under the interpreter, it has no effect)."""
    return torch.cuda.device(tensor.device.index if tensor.is_cuda else -1)
