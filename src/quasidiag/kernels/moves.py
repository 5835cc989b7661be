# mypy: disable-error-code="no-untyped-def"
"""The GPU kernel of a move: all parameters in one launch, and one pass over memory.

As ``kernels.fused``, this is imported only where Triton is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasidiag.kernels.fused import on

#: Numbers that one program moves.
BLOCK = 4096


@triton.jit
def _address(table, k, ALIGNED: tl.constexpr):
    at = tl.load(table + k).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(at, 16) if ALIGNED else at


@triton.jit
def _move(
    addresses, owners, starts, sizes, count, by, keep,
    SETTLES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``native.move_``, of a part of one tensor. Addresses are 0 where there is nothing to follow the move."""
    part = tl.program_id(0)
    k = tl.load(owners + part)
    at = tl.load(starts + part) + tl.arange(0, BLOCK)
    mask = at < tl.load(sizes + k)
    theta, w = _address(addresses, k, ALIGNED), _address(addresses + count, k, ALIGNED)
    apart = _address(addresses + 2 * count, k, ALIGNED)
    way = _address(addresses + 3 * count, k, ALIGNED)
    follows, counts = apart.to(tl.int64) != 0, way.to(tl.int64) != 0
    moved = by * tl.load(w + at, mask=mask)
    tl.store(w + at, moved, mask=mask)
    now = tl.load(theta + at, mask=mask) + moved
    if counts:
        tl.store(way + at, tl.load(way + at, mask=mask) + moved, mask=mask)
    if follows:
        offset = keep * (tl.load(apart + at, mask=mask) + moved)
        tl.store(apart + at, offset, mask=mask)
        if SETTLES:
            now -= offset
    tl.store(theta + at, now, mask=mask)


def move_(
    thetas: Sequence[Tensor],
    ws: Sequence[Tensor],
    by: float,
    aparts: Sequence[Tensor | None],
    keep: float,
    ways: Sequence[Tensor | None],
    settles: bool,
) -> None:
    """See ``native.move_``, of tensors on one device."""
    device, lists = ws[0].device, (thetas, ws, aparts, ways)
    addresses = [0 if x is None else x.data_ptr() for some in lists for x in some]
    owners, starts, sizes = _parts(tuple(w.numel() for w in ws), device)
    with on(ws[0]):
        _move[(len(owners),)](
            *(torch.tensor(addresses, device=device), owners, starts, sizes, len(ws), by, keep),
            SETTLES=settles,
            ALIGNED=not any(address % 16 for address in addresses),
            BLOCK=BLOCK,
            num_warps=8,
        )


@functools.lru_cache(8)  # every step moves the same parameters
def _parts(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each program its tensor and where it begins there; and the sizes of tensors."""
    parts = [(k, start) for k, size in enumerate(sizes) for start in range(0, size, BLOCK)]
    owners, starts = zip(*parts)
    return tuple(torch.tensor(x, device=device) for x in (owners, starts, sizes))  # type: ignore[return-value]
