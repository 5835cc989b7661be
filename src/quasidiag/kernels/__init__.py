"""Fast twins of the elementwise work: one pass over memory where eager PyTorch makes a dozen.

``native`` compiles a page of C for the CPU, ``fused`` holds the Triton kernels for a GPU. Both are optional. Every
function here returns ``False`` (or ``None``) where no kernel applies, having done nothing; the eager code beside each
call is then used, and is the oracle that the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quasidiag import moments
from quasidiag.kernels import native
from quasidiag.kernels.rule import Rule
from quasidiag.moments import Moments

Tensors = Sequence[Tensor]


def quasi_diagonal(
    m00: Tensor,
    m0i: Tensor,
    mii: Tensor,
    v0: Tensor,
    vi: Tensor,
    shift: Tensor | None,
    rule: Rule,
    **outputs: Tensors | None,
) -> bool:
    """``reductions.quasi_diagonal`` and what follows it: into ``w``, or through ``buffers`` into ``thetas``."""
    return native.quasi_diagonal(m00, m0i, mii, v0, vi, shift, rule, **outputs)


def diagonal(moments: Tensors, gradients: Tensors, rule: Rule, **outputs: Tensors | None) -> bool:
    """``reductions.diagonal`` and what follows it, for several parameters."""
    return native.diagonal(moments, gradients, rule, **outputs)


def accumulate_(
    into: Moments, a: Tensor, w: Tensor, shift: Tensor | None, keep: float, gain: float
) -> bool:
    """``into ← keep·into + gain·moments(a - shift, w)`` of a dense layer, ``a: [rows, in]``, ``w: [rows, out]``."""
    if into.mii is None:
        return False
    if (pair := native.centre(a, shift if into.m0i is not None else None)) is None:
        return False
    if into.m00 is not None:
        into.m00.mul_(keep).add_(w.sum(0), alpha=gain)
    if into.m0i is not None:
        into.m0i.addmm_(w.T, pair[0], beta=keep, alpha=gain)
    into.mii.addmm_(w.T, pair[1], beta=keep, alpha=gain)
    return True


def square(delta: Tensor, scale: float | Tensor = 1.0, onto: Tensor | None = None) -> Tensor:
    """``(scale·delta)²`` as ``moments.square`` has it, added ``onto`` what is there already."""
    if delta.device.type == "cpu" and (w := native.square(delta, float(scale), onto)) is not None:
        return w
    dtype = torch.promote_types(delta.dtype, torch.float32)
    w = moments.square(delta.to(dtype) * scale, dtype)
    return w if onto is None else onto.add_(w)


__all__ = ["Rule", "accumulate_", "diagonal", "quasi_diagonal", "square"]
