"""Decides which calls go to the Triton kernels: those with plain, contiguous tensors on a CUDA device."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quasidiag.kernels.rule import Rule
from quasidiag.kernels.wanted import Place, Wanted
from quasidiag.moments import PLAIN, Moments

_HALVES = (torch.float16, torch.bfloat16)


@functools.cache
def fused() -> ModuleType | None:
    """The module of the kernels, or ``None`` without Triton; ``QUASIDIAG_TRITON=0`` turns them off."""
    if os.environ.get("QUASIDIAG_TRITON", "1") == "0":
        return None
    try:
        from quasidiag.kernels import fused as module
    except ImportError:
        return None
    return module


def usable(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether the kernels can read and write these tensors."""
    for t in tensors:
        if t is not None and not (
            type(t) in PLAIN
            and t.dtype in dtypes
            and (t.is_cuda or interpreted())
            and t.is_contiguous()
            and t.numel()
        ):
            return False
    return not torch.compiler.is_compiling() and fused() is not None


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, which tests the kernels on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def quasi_diagonal(
    m00: Tensor,
    m0i: Tensor,
    mii: Tensor,
    v0: Tensor,
    vi: Tensor,
    shift: Tensor | None,
    rule: Rule,
    *,
    w: Sequence[Tensor] | None = None,
    buffers: Sequence[Tensor] | None = None,
    thetas: Sequence[Tensor] | None = None,
) -> bool:
    """See ``native.quasi_diagonal``. Gradients and parameters may be in half precision."""
    free = [v0, vi, *(thetas or ())]
    if not (usable(m00, m0i, mii, shift, *(w or ()), *(buffers or ())) and _floats(free)):
        return False
    fused().quasi_diagonal(m00, m0i, mii, v0, vi, shift, rule, w, buffers, thetas)  # type: ignore[union-attr]
    return True


def diagonal(
    moments: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rule: Rule,
    *,
    w: Sequence[Tensor] | None = None,
    buffers: Sequence[Tensor] | None = None,
    thetas: Sequence[Tensor] | None = None,
) -> bool:
    """See ``native.diagonal``."""
    free = [*gradients, *(thetas or ())]
    if not (usable(*moments, *(w or ()), *(buffers or ())) and _floats(free)):
        return False
    fused().diagonal(moments, gradients, rule, w, buffers, thetas)  # type: ignore[union-attr]
    return True


def square(delta: Tensor, scale: float | Tensor, onto: Tensor | None = None) -> Tensor | None:
    """See ``native.square``."""
    if not (_floats([delta]) and (onto is None or _floats([onto]))):
        return None
    return fused().square(delta, scale, onto)  # type: ignore[union-attr]


def accumulate_(
    into: Moments, a: Tensor, w: Tensor, shift: Tensor | None, keep: float, gain: float | Tensor
) -> bool:
    """See ``kernels.accumulate_``: in float32, or in bfloat16 if the derivatives were in half precision."""
    # Under autocast a layer may be given float32 and still multiply in half precision, so w decides. PyTorch before
    # 2.8 cannot sum products of half-precision numbers into float32.
    mixed = (
        w.dtype == torch.bfloat16 and a.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads()
    )
    same = a.dtype == w.dtype == torch.float32
    if not ((same or mixed) and _floats([a, w]) and usable(*into, shift)):
        return False
    fused().accumulate_(into, a, w, shift, keep, gain)  # type: ignore[union-attr]
    return True


def turned(wanted: Wanted) -> bool:
    """Whether kernels can bring these gradients into the coordinates of the metric, and their steps back."""
    return wanted.v[-1].is_cuda and usable(*wanted.v, *wanted.root)


def turn_(wanted: Wanted, place: Place) -> None:
    """See ``turning.turn_``, where :func:`turned` says so."""
    from quasidiag.kernels import turning

    turning.turn_(wanted, place)


def turn_back(wanted: Wanted, place: Place) -> list[Tensor]:
    """See ``turning.turn_back``, where :func:`turned` says so."""
    from quasidiag.kernels import turning

    return turning.turn_back(wanted, place)


def move_(
    thetas: Sequence[Tensor],
    ws: Sequence[Tensor],
    by: float,
    aparts: Sequence[Tensor | None],
    keep: float,
    ways: Sequence[Tensor | None],
    settles: bool,
) -> list[Any] | None:
    """See ``native.move_``; the norms are tensors, as :func:`quasidiag.auto.rest.settle_` would have them."""
    if not usable(*thetas, *ws, *aparts, *ways):
        return None
    followed = [[x for x in of if x is not None] for of in zip(thetas, ws, aparts, ways)]
    if len({x.device for of in followed for x in of}) != 1:
        return None
    if any(x.shape != of[0].shape for of in followed for x in of):
        return None
    from quasidiag.kernels import moves

    moves.move_(thetas, ws, by, aparts, keep, ways, settles)
    return norms([p.data for p in thetas]) if settles else [math.nan] * len(ws)


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each tensor, the same to the bit whatever others there are.

    With tensors of another kind among them, torch would compute all of them in another way.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, x in enumerate(tensors):
        alike.setdefault((x.device, x.dtype, x.is_contiguous()), []).append(i)
    found: dict[int, Tensor] = {}
    for some in alike.values():
        found |= zip(some, torch._foreach_norm([tensors[i] for i in some]))
    return [found[i] for i in range(len(tensors))]


def _floats(tensors: Sequence[Tensor]) -> bool:
    return usable(*tensors, dtypes=(torch.float32, *_HALVES))
