"""Fast twins of what a step does to a layer: one pass over memory where eager PyTorch makes a dozen.

``native`` compiles some pages of C for the CPU, ``fused`` holds the Triton kernels for a GPU. Both are optional. A function
here that returns ``False`` or ``None`` had no kernel to use and has done nothing; the eager code beside the call is then
used, and is the oracle that the kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from quasidiag import moments
from quasidiag.kernels import gpu, native
from quasidiag.kernels.native import Directions, directed
from quasidiag.kernels.rule import Rule
from quasidiag.kernels.squares import Squares
from quasidiag.kernels.wanted import Averaging, Found, Lengths, Wanted
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
    backend = gpu if mii.is_cuda else native
    return _written(backend.quasi_diagonal(m00, m0i, mii, v0, vi, shift, rule, **outputs), outputs)


def diagonal(moments: Tensors, gradients: Tensors, rule: Rule, **outputs: Tensors | None) -> bool:
    """``reductions.diagonal`` and what follows it, for several parameters."""
    backend = gpu if moments[0].is_cuda else native
    return _written(backend.diagonal(moments, gradients, rule, **outputs), outputs)


def _written(done: bool, outputs: dict[str, Tensors | None]) -> bool:
    """Tell autograd what a kernel wrote, so that a stale graph is noticed as ever."""
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
    """:func:`accumulate_`, then :func:`quasi_diagonal` or :func:`diagonal`, in one go; of a bias and a weight."""
    if a.is_cuda or rule.momentum:
        return False
    done = native.products_(into, a, w, shift, keep, float(gain), gradients, rule, thetas)
    return _written(done, {"thetas": thetas})


def squares(delta: Tensor, scale: float | Tensor = 1.0) -> Tensor | Squares:
    """``(scale·delta)²``, left to the product that it is for, where that can."""
    if not delta.is_cuda and native.multiplies() and native.usable(delta.numel(), delta) and scale:
        return Squares(delta, float(scale))
    return square(delta, scale)


def square(
    delta: Tensor, scale: float | Tensor = 1.0, onto: Tensor | Squares | None = None
) -> Tensor:
    """``(scale·delta)²`` as ``moments.square`` has it, added ``onto`` what is there already."""
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


def root(
    m00: Tensor,
    m0i: Tensor,
    mii: Tensor,
    shift: Tensor | None,
    bounds: tuple[float, float, float] | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``root.quasi_diagonal``, or ``None`` where no kernel can."""
    return None if mii.is_cuda else native.root(m00, m0i, mii, shift, bounds)


def lengths(
    layers: Sequence[tuple[Tensors, Sequence[Tensor | None]]], half: float
) -> list[Lengths] | None:
    """The lengths of layers' steps, ``[units(, inputs)]``, by their roots, or ``None`` where no kernel can."""
    return native.lengths(layers, half)


def average_(
    averages: Tensors, gradients: Tensors, by: float, factors: Sequence[float]
) -> list[Tensor] | None:
    """The kernel of :func:`quasidiag.auto.proposal.averaged_`, or ``None`` where no kernel can."""
    return native.average_(averages, gradients, by, factors)


def move_(
    thetas: Tensors,
    ws: Tensors,
    by: float,
    aparts: Sequence[Tensor | None],
    keep: float,
    ways: Sequence[Tensor | None],
    settles: bool = False,
) -> list[float] | None:
    """That of :func:`quasidiag.auto.moving.move_`, and if wanted of :func:`quasidiag.auto.rest.settle_`, with its norms."""
    norms = native.move_(thetas, ws, by, aparts, keep, ways, settles)
    _written(norms is not None, {"thetas": thetas})
    return norms


def settle_(thetas: Tensors, aparts: Tensors) -> list[float] | None:
    """That of :func:`quasidiag.auto.rest.settle_`, with the norms of where parameters have come to rest."""
    return native.settle_(thetas, aparts)


def lead_(
    thetas: Tensors, aparts: Tensors, norms: Sequence[float], allowed: Sequence[float]
) -> list[bool] | None:
    """That of :func:`quasidiag.auto.rest.lead_`, with whether parameters are as they were left."""
    return native.lead_(thetas, aparts, norms, allowed)


def dots(xs: Tensors, ys: Tensors) -> list[float] | None:
    """The products of :func:`quasidiag.auto.directions.dots`, pair by pair."""
    return native.dots(xs, ys)


def finite(tensors: Sequence[Any]) -> bool | None:
    """Whether all numbers are finite, or ``None`` where no kernel can say (or it is not tensors)."""
    return native.finite(tensors)


__all__ = [
    "Averaging",
    "Directions",
    "Found",
    "Lengths",
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
    "quasi_diagonal",
    "root",
    "settle_",
    "square",
    "squares",
    "weaken_",
]
