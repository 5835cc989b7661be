"""The CPU kernels of a step, compiled at first use (:mod:`quasidiag.kernels.building`).

Where there is no compiler, or tensors are not plain float32 on a CPU, every function here returns ``None`` or ``False``.
The caller then runs its eager code, which is also the oracle that the tests compare with.

``QUASIDIAG_NATIVE=0`` in the environment turns it off.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from quasidiag.kernels.building import FLAGS, built
from quasidiag.kernels.rule import Rule
from quasidiag.kernels.squares import Squares
from quasidiag.kernels.wanted import Averaging, Found, Lengths, Wanted
from quasidiag.moments import PLAIN, Moments, smallest

SMALLEST = smallest(torch.float32)
#: Layers of fewer numbers than this are left to eager code by kernels that would not save many calls.
LEAST = 4_096
#: Matrices with fewer rows (or columns) than the first are mostly padding when packed: if longer than the second, they
#: are left to eager code.
NARROW, LONG = 16, 4_096

_FLOAT32 = torch.float32


class Factors(IntEnum):
    """The factors of products in ``orthogonal.c``: floats, or bfloat16 in pairs (AVX512_BF16) or in tiles (AMX)."""

    FLOATS, PAIRS, TILES = range(3)


class _Rule(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in Rule._fields]


_SIZE, _POINTER, _FLOAT, _FLAG = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_int


class _Alike(ctypes.Structure):
    _fields_ = [
        *((name, _SIZE) for name in ("layers", "units", "n", "groups")),
        *(
            (name, _POINTER)
            for name in ("v0", "vi", "g0", "gi", "bias", "mean", "scale", "w0", "wi")
        ),
        *((name, _FLOAT) for name in ("shortest", "by", "new", "factor")),
        ("slope", ctypes.c_double),
    ]


class _Measured(ctypes.Structure):
    _fields_ = [
        *((name, _SIZE) for name in ("units", "n")),
        *((name, _POINTER) for name in ("w0", "wi", "bias", "mean", "scale")),
        *((name, ctypes.c_double) for name in ("total", "share")),
    ]


#: The argument types of each C function; the number of threads is one more.
_SIGNATURES: dict[str, list[Any]] = {
    "qd_quasi_diagonal": [_SIZE, _SIZE, *[_POINTER] * 6, _FLAG, *[_POINTER] * 6, _Rule],
    "qd_diagonal": [_SIZE, *[_POINTER] * 6, _Rule],
    "qd_average": [_SIZE, *[_POINTER] * 5, _FLOAT],
    "qd_move": [_SIZE, *[_POINTER] * 5, _FLOAT, _FLOAT, _POINTER],
    "qd_lead": [_SIZE, *[_POINTER] * 6],
    "qd_dots": [_SIZE, *[_POINTER] * 4],
    "qd_square": [_SIZE, _POINTER, _FLOAT, _FLOAT, _FLAG, _POINTER],
    "qd_weaken": [_SIZE, _POINTER, _FLOAT, _POINTER],
    "qd_centre": [_SIZE, _SIZE, *[_POINTER] * 4],
    "qd_finite": [_SIZE, *[_POINTER] * 3],
    "qd_root": [_SIZE, _SIZE, _SIZE, *[_POINTER] * 8],
    "qd_lengths": [_SIZE, _POINTER, ctypes.c_double],
    "qd_directions": [_SIZE, _POINTER, _FLOAT, _POINTER, _POINTER, _SIZE, _FLAG],
    "qd_products": [_SIZE, _SIZE, _SIZE, *[_POINTER] * 6, *[_FLOAT] * 4, *[_POINTER] * 4, _Rule],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or ``None`` where they cannot be compiled or are turned off."""
    if os.environ.get("QUASIDIAG_NATIVE", "1") == "0" or platform.system() != "Linux":
        return None
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    try:
        found = ctypes.CDLL(str(built(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home directory
        return None
    for name, types in _SIGNATURES.items():
        getattr(found, name).argtypes = [*types, ctypes.c_int]
    return found


@functools.cache
def multiplies() -> bool:
    """Whether to use ``products.c``: only with AVX2, as with AVX-512 or without AVX2 torch's own products are faster."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


@functools.cache
def vectors() -> bool:
    """Whether to use ``direction.c``: it is written for AVX2 and AVX-512."""
    return torch.backends.cpu.get_cpu_capability() in FLAGS


@functools.cache
def factors() -> Factors:
    """What ``direction.c`` multiplies: bfloat16 (``orthogonal.by_poles``) only where a processor is faster at that."""
    compiled = library()
    return Factors.FLOATS if compiled is None else Factors(compiled.qd_fastest())


def usable(size: int, *tensors: Tensor | None) -> bool:
    """Whether the tensors are :func:`dense`, and ``size`` is worth a kernel."""
    return size >= LEAST and dense(*tensors)


def dense(*tensors: Tensor | None) -> bool:
    """Whether kernels can be used, and all tensors are plain, contiguous and float32 on the CPU."""
    for t in tensors:
        if t is not None and not (
            type(t) in PLAIN and t.dtype is _FLOAT32 and t.is_cpu and t.is_contiguous()
        ):
            return False
    return not torch.compiler.is_compiling() and library() is not None


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
    """Solve (``reductions.quasi_diagonal``), and write ``w``, update momentum ``buffers``, move ``thetas``, if given."""
    groups = [pair or (None, None) for pair in (w, buffers, thetas)]
    outputs = [t for pair in groups for t in pair]
    if not usable(mii.numel(), m00, m0i, mii, v0, vi, shift, *outputs):
        return False
    rows, n = mii.shape
    point = mii.new_zeros(n) if shift is None else shift
    numbers, written = map(_pointer, (m00, m0i, mii, v0, vi, point)), map(_pointer, outputs)
    plain = _Rule(*map(float, rule))
    _call("qd_quasi_diagonal", rows, n, *numbers, shift is not None, *written, plain)
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
    """As :func:`quasi_diagonal`, for the diagonal reduction (``reductions.diagonal``) of several parameters."""
    lists = [moments, gradients, w, buffers, thetas]
    sizes = [m.numel() for m in moments]
    if not usable(sum(sizes), *(t for tensors in lists for t in tensors or ())):
        return False
    arrays = [tensors and _pointers(tensors) for tensors in lists]
    _call("qd_diagonal", len(sizes), _sizes(sizes), *arrays, _Rule(*map(float, rule)))
    return True


def average_(
    averages: Sequence[Tensor], gradients: Sequence[Tensor], by: float, factors: Sequence[float]
) -> list[Tensor] | None:
    """``average ← average + by·(gradient - average)``; returns the same applied once more, times ``factors``."""
    if not (dense(*averages, *gradients) and _fit(averages, gradients)):
        return None
    found = [torch.empty_like(average) for average in averages]
    sizes, lists = [g.numel() for g in gradients], map(_pointers, (averages, gradients, found))
    _call("qd_average", len(sizes), _sizes(sizes), *lists, _numbers(factors), by)
    return found


def move_(
    thetas: Sequence[Tensor],
    ws: Sequence[Tensor],
    by: float,
    aparts: Sequence[Tensor | None],
    keep: float,
    ways: Sequence[Tensor | None],
    settles: bool,
) -> list[float] | None:
    """``w ← by·w``, ``θ ← θ + w``, ``apart ← keep·(apart + w)``, ``way ← way + w``; then :func:`settle_` if ``settles``.

    Returns the norms after :func:`settle_`, or NaNs without it. ``w`` is not written where there are ``apart`` and ``way``.
    """
    if not (dense(*thetas, *ws, *aparts, *ways) and _fit(ws, thetas, aparts, ways)):
        return None
    norms = (ctypes.c_double * len(ws))() if settles else None
    sizes, lists = [w.numel() for w in ws], map(_pointers, (thetas, ws, aparts, ways))
    if not _call("qd_move", len(sizes), _sizes(sizes), *lists, by, keep, norms):
        return None
    return norms[:] if norms is not None else [math.nan] * len(ws)


def settle_(thetas: Sequence[Tensor], aparts: Sequence[Tensor]) -> list[float] | None:
    """``θ ← θ - apart``; returns the norms of θ after that."""
    if not (dense(*thetas, *aparts) and _fit(aparts, thetas)):
        return None
    norms, sizes = (ctypes.c_double * len(thetas))(), [e.numel() for e in aparts]
    lists = _pointers(thetas), None, _pointers(aparts), None
    done = _call("qd_move", len(sizes), _sizes(sizes), *lists, 0.0, 0.0, norms)
    return norms[:] if done else None


def lead_(
    thetas: Sequence[Tensor],
    aparts: Sequence[Tensor],
    norms: Sequence[float],
    allowed: Sequence[float],
) -> list[bool] | None:
    """``θ ← θ + apart``, but ``apart ← 0`` if θ's norm is not the one in ``norms``; returns whether it is."""
    if not (dense(*thetas, *aparts) and _fit(aparts, thetas)):
        return None
    were, found = (ctypes.c_double * len(norms))(*norms), (ctypes.c_double * len(norms))()
    sizes, lists = [e.numel() for e in aparts], map(_pointers, (thetas, aparts))
    if not _call("qd_lead", len(sizes), _sizes(sizes), *lists, were, _numbers(allowed), found):
        return None
    return [norm == norm for norm in found[:]]  # not NaN


def dots(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[float] | None:
    """The dot product of each pair."""
    if not (dense(*xs, *ys) and _fit(xs, ys)):
        return None
    found = (ctypes.c_double * len(xs))()
    sizes, lists = [x.numel() for x in xs], map(_pointers, (xs, ys))
    return [*found] if _call("qd_dots", len(sizes), _sizes(sizes), *lists, found) else None


def _fit(tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> bool:
    """Whether all have the same shapes. If somebody has changed a parameter's shape, the eager code raises the error."""
    shapes = [t.shape for t in tensors]
    return all(
        [shape if t is None else t.shape for t, shape in zip(ts, shapes)] == shapes for ts in others
    )


def square(delta: Tensor, scale: float | Tensor = 1.0, onto: Tensor | None = None) -> Tensor | None:
    """``(scale·delta)²`` as by ``moments.square``, added to ``onto`` in place if that is given."""
    if not usable(delta.numel(), delta, onto):
        return None
    out = torch.empty_like(delta) if onto is None else onto
    add = onto is not None
    _call("qd_square", delta.numel(), _pointer(delta), float(scale), SMALLEST, add, _pointer(out))
    return out


def weaken_(w: Tensor, slope: Tensor) -> bool:
    """``w ← w·slope²``, with what would be denormal set to zero."""
    if not usable(w.numel(), w, slope):
        return False
    _call("qd_weaken", w.numel(), _pointer(slope), SMALLEST, _pointer(w))
    return True


def products_(
    into: Moments,
    a: Tensor,
    w: Tensor | Squares,
    shift: Tensor | None,
    keep: float,
    gain: float,
    gradients: Sequence[Tensor] | None = None,
    rule: Rule | None = None,
    thetas: Sequence[Tensor] | None = None,
) -> bool:
    """``into ← keep·into + gain·moments(a - shift, w)`` of a dense layer, ``a: [rows, n]`` and ``w: [rows, units]``.

    With ``thetas`` (bias, weight) their step follows, as in :func:`quasi_diagonal` or :func:`diagonal`.
    """
    m00, m0i, mii = into
    if thetas and (m00 is None or (m0i is None) is not (shift is None)):
        return False
    w, scale = w if isinstance(w, Squares) else (w, 0.0)
    moved = [*(gradients or (None, None)), *(thetas or (None, None))]
    if mii is None or mii.dim() != 2 or not multiplies():
        return False
    if not usable(mii.numel(), *into, a, w, shift, *moved):
        return False
    numbers, following = map(_pointer, (a, w, shift, m00, m0i, mii)), map(_pointer, moved)
    factors, plain = (keep, gain, scale, SMALLEST), _Rule(*map(float, rule or Rule()))
    sizes = (*a.shape, w.shape[1])
    return bool(_call("qd_products", *sizes, *numbers, *factors, *following, plain))


def root(
    m00: Tensor,
    m0i: Tensor,
    mii: Tensor,
    shift: Tensor | None,
    bounds: tuple[float, float, float] | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """``root.quasi_diagonal``, of ``mii: [..., units, n]``."""
    if not mii.numel() or not dense(m00, m0i, mii, shift):
        return None
    units, n = mii.shape[-2:]
    assert shift is None or shift.numel() * units == mii.numel()
    found = torch.empty_like(m00), torch.empty_like(mii), torch.empty_like(mii)
    given = *map(_pointer, (m00, m0i, mii, shift)), bounds and _numbers(bounds)
    done = _call("qd_root", m00.numel(), n, units, *given, *map(_pointer, found))
    return found if done else None


def lengths(
    layers: Sequence[tuple[Sequence[Tensor], Sequence[Tensor | None]]], half: float
) -> list[Lengths] | None:
    """For each layer, given its step and its root: the sum and ``proportions.share`` of the units' ``Root.lengths``."""
    if not all(w[-1].numel() and dense(*w, *root) for w, root in layers):
        return None
    every = (_Measured * len(layers))(*(_measured(w, root) for w, root in layers))
    if not _call("qd_lengths", len(layers), ctypes.addressof(every), half):
        return None
    return [Lengths(layer.total, layer.share) for layer in every]


def _measured(w: Sequence[Tensor], root: Sequence[Tensor | None]) -> _Measured:
    bias = w[0] if len(w) > 1 else None
    return _Measured(*w[-1].shape, *map(_pointer, (bias, w[-1], *root)))


def directed(layers: Wanted) -> bool:
    """Whether :class:`Directions` can handle these layers."""
    units, n = layers.v[-1].shape[-2:]
    narrow = min(units, n) < NARROW and max(units, n) > LONG
    return bool(units * n) and not narrow and vectors() and dense(*layers.v, *layers.root)


class Directions:
    """Finds the directions of all layers in one call. Addresses that stay the same from step to step are read only once."""

    def __init__(
        self, wanted: Sequence[Wanted], whole: float, poles: Sequence[tuple[float, float]]
    ) -> None:
        self.wanted, self._every = wanted, (_Alike * len(wanted))(*map(_alike, wanted))
        self._shapes = [v.shape for layers in wanted for v in layers.v]
        self._rational = whole, *map(_numbers, zip(*poles)), len(poles)

    def average(self, averagings: Sequence[Averaging], new: float) -> bool:
        """Have :meth:`find` take these gradients into the averages ``v`` first; ``False`` if it cannot."""
        gradients = [g for averaging in averagings for g in averaging.gradients]
        if not (dense(*gradients) and [g.shape for g in gradients] == self._shapes):
            return False
        for to, layers, (given, factor, length) in zip(self._every, self.wanted, averagings):
            to.g0, to.gi = _pair(given)
            to.new, to.factor, to.by = new, factor, layers.by * length
        return True

    def find(self) -> list[Found] | None:
        """The directions of all layers, or ``None`` if there is not enough memory."""
        found = [[torch.empty_like(x) for x in layers.v] for layers in self.wanted]
        for to, w in zip(self._every, found):
            to.w0, to.wi = _pair(w)
        at = ctypes.addressof(self._every)
        if not _call("qd_directions", len(found), at, *self._rational, factors()):
            return None
        return [Found(w, layers.slope) for w, layers in zip(found, self._every)]


def _alike(layers: Wanted) -> _Alike:
    v, root = layers.v, layers.root
    assert len(v) == 2 - (root[0] is None)
    shape = v[-1].shape if v[-1].dim() == 3 else (1, *v[-1].shape)
    arrays = *_pair(v), None, None, *map(_pointer, root), None, None
    return _Alike(*shape, layers.groups, *arrays, layers.shortest, layers.by, 1.0, 1.0)


def _pair(tensors: Sequence[Tensor]) -> tuple[int | None, int]:
    """The addresses of a bias, if there is one, and a weight."""
    return None if len(tensors) == 1 else tensors[0].data_ptr(), tensors[-1].data_ptr()


def finite(numbers: Sequence[Any]) -> bool | None:
    """Whether all numbers are finite, of :class:`Squares` those that they stand for; ``None`` where no kernel can say."""
    scales = [x.scale if isinstance(x, Squares) else 0.0 for x in numbers]
    tensors = [x.delta if isinstance(x, Squares) else x for x in numbers]
    sizes = [t.numel() for t in tensors if isinstance(t, Tensor)]
    if not dense(*tensors):
        return None
    arrays = _pointers(tensors), _numbers(scales)
    return bool(_call("qd_finite", len(sizes), _sizes(sizes), *arrays))


def centre(a: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """``a - shift`` and its square, of ``a: [rows, n]``."""
    if a.dim() != 2 or not usable(a.numel(), a, shift):
        return None
    centred = None if shift is None else torch.empty_like(a)
    squared = torch.empty_like(a)
    _call("qd_centre", *a.shape, *map(_pointer, (a, shift, centred, squared)))
    return (a if centred is None else centred), squared


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[t if t is None else t.data_ptr() for t in tensors])


def _numbers(numbers: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(numbers))(*numbers)


def _sizes(sizes: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(sizes))(*sizes)


def _call(name: str, *arguments: object) -> int:
    compiled = library()
    assert compiled is not None
    return int(getattr(compiled, name)(*arguments, 1 if _forked else torch.get_num_threads()))


#: A forked process uses one thread: OpenMP's threads do not survive a fork, and GNU's waits for them forever.
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
