"""Fast versions of what a step does to a layer: one pass over memory where eager PyTorch makes a dozen.

``native`` compiles C code for the CPU; ``fused`` (the update), ``turning`` (directions) and ``moves`` hold the Triton
kernels for a GPU, which ``gpu`` calls. Both are optional. A function here that returns ``False`` or ``None`` had no kernel
to use and has done nothing. The caller then runs its eager code, which is also the oracle that the kernels are tested
against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from quasidiag import moments
from quasidiag.kernels import gpu, native
from quasidiag.kernels.gpu import norms, turn_, turn_back, turned
from quasidiag.kernels.native import (
    Directions,
    average_,
    directed,
    dots,
    finite,
    lead_,
    lengths,
    root,
    settle_,
)
from quasidiag.kernels.rule import Rule
from quasidiag.kernels.squares import Squares
from quasidiag.kernels.wanted import Averaging, Found, Lengths, Place, Wanted
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
    """``reductions.quasi_diagonal``, written into ``w``, or applied by ``rule`` to ``buffers`` (momentum) and ``thetas``."""
    backend = gpu if mii.is_cuda else native
    return _written(backend.quasi_diagonal(m00, m0i, mii, v0, vi, shift, rule, **outputs), outputs)


def diagonal(moments: Tensors, gradients: Tensors, rule: Rule, **outputs: Tensors | None) -> bool:
    """As :func:`quasi_diagonal`, with ``reductions.diagonal``, for several parameters."""
    backend = gpu if moments[0].is_cuda else native
    return _written(backend.diagonal(moments, gradients, rule, **outputs), outputs)


def _written(done: bool, outputs: dict[str, Tensors | None]) -> bool:
    """If a kernel is ``done``, tell autograd which tensors it wrote, so that stale graphs are noticed as usual."""
    if done:
        for tensors in outputs.values():
            increment_version(tensors or ())
    return done


def accumulate_(
    into: Moments,
    a: Tensor,
    w: Tensor | Squares,
    shift: Tensor | None,
    keep: float,
    gain: float | Tensor,
) -> bool:
    """``into ← keep·into + gain·moments(a - shift, w)`` of a dense layer, ``a: [rows, in]``, ``w: [rows, out]``."""
    if into.mii is None:
        return False
    if isinstance(w, Tensor) and a.is_cuda:
        return gpu.accumulate_(into, a, w, shift, keep, gain)
    gain = float(gain)
    if native.products_(into, a, w, shift, keep, gain):
        return True
    w = w.formed() if isinstance(w, Squares) else w
    if w.dtype != into.mii.dtype or (pair := native.centre(a, shift)) is None:
        return False
    if into.m00 is not None:
        into.m00.mul_(keep).add_(w.sum(0), alpha=gain)
    if into.m0i is not None:
        into.m0i.addmm_(w.T, pair[0], beta=keep, alpha=gain)
    into.mii.addmm_(w.T, pair[1], beta=keep, alpha=gain)
    return True


def advance_(
    into: Moments,
    a: Tensor,
    w: Tensor | Squares,
    shift: Tensor | None,
    keep: float,
    gain: float | Tensor,
    gradients: Tensors,
    rule: Rule,
    thetas: Tensors,
) -> bool:
    """:func:`accumulate_`, then :func:`quasi_diagonal` or :func:`diagonal` of a bias and a weight, in one call."""
    if a.is_cuda or rule.momentum:
        return False
    done = native.products_(into, a, w, shift, keep, float(gain), gradients, rule, thetas)
    return _written(done, {"thetas": thetas})


def squares(delta: Tensor, scale: float | Tensor = 1.0) -> Tensor | Squares:
    """``(scale·delta)²``; as :class:`Squares`, not yet computed, if the matrix product that needs it can do that."""
    if not delta.is_cuda and native.multiplies() and native.usable(delta.numel(), delta) and scale:
        return Squares(delta, float(scale))
    return square(delta, scale)


def square(
    delta: Tensor, scale: float | Tensor = 1.0, onto: Tensor | Squares | None = None
) -> Tensor:
    """``(scale·delta)²`` as by ``moments.square``, added to ``onto`` in place if that is given."""
    backend = gpu if delta.is_cuda else native
    onto = onto.formed() if isinstance(onto, Squares) else onto
    if (w := backend.square(delta, scale, onto)) is not None:
        return w
    dtype = torch.promote_types(delta.dtype, torch.float32)
    w = moments.square(delta.to(dtype) * scale, dtype)
    return w if onto is None else onto.add_(w)


def weaken_(w: Tensor, slope: Tensor) -> None:
    """``w ← w·slope²``, with what would be denormal set to zero."""
    if not native.weaken_(w, slope):
        w.mul_(slope.to(w.dtype).square())
        torch.hardshrink(w, moments.smallest(w.dtype), out=w)


def move_(
    thetas: Tensors,
    ws: Tensors,
    by: float,
    aparts: Sequence[Tensor | None],
    keep: float,
    ways: Sequence[Tensor | None],
    settles: bool = False,
) -> Sequence[float | Tensor] | None:
    """The kernel of :func:`quasidiag.auto.moving.move_`, with :func:`settle_` if ``settles``; returns norms, or ``None``."""
    backend = gpu if ws and ws[0].is_cuda else native
    norms = backend.move_(thetas, ws, by, aparts, keep, ways, settles)
    _written(norms is not None, {"thetas": thetas})
    return norms


__all__ = [
    "Averaging",
    "Directions",
    "Found",
    "Lengths",
    "Place",
    "Rule",
    "Squares",
    "Wanted",
    "accumulate_",
    "advance_",
    "average_",
    "diagonal",
    "directed",
    "dots",
    "finite",
    "lead_",
    "lengths",
    "move_",
    "norms",
    "quasi_diagonal",
    "root",
    "settle_",
    "square",
    "squares",
    "turn_",
    "turn_back",
    "turned",
    "weaken_",
]
