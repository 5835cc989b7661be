"""The elementwise work of a step on a CPU, compiled at first use from ``native.c``.

The system's own C compiler is asked once (under a second) and its answer kept in the user's cache. Where there is no
compiler, or the numbers are not plain float32 on a CPU, every function here says so by returning ``None`` or ``False``
and the caller goes the eager way, which is also the oracle that the tests compare with.

``QUASIDIAG_NATIVE=0`` in the environment turns it off, ``QUASIDIAG_CACHE`` says where compiled code is kept.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quasidiag.kernels.rule import Rule
from quasidiag.moments import smallest

#: Layers smaller than this are not worth a compiler.
LEAST = 4_096

_FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}


class _Rule(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in Rule._fields]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or ``None`` where they cannot be had."""
    if os.environ.get("QUASIDIAG_NATIVE", "1") == "0" or platform.system() != "Linux":
        return None
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def _build(compiler: str) -> Path:
    """The shared library for this processor, from the cache if it is there."""
    source = Path(__file__).with_name("native.c")
    capability = torch.backends.cpu.get_cpu_capability()
    flags = ["-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
    flags += ["-shared", "-fPIC", *_FLAGS.get(capability, [])]
    key = " ".join([platform.machine(), compiler, *flags]).encode() + source.read_bytes()
    name = f"native-{hashlib.sha256(key).hexdigest()[:16]}.so"
    folder = _cache()
    target = folder / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            command = [compiler, *flags, str(source), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            built.replace(target)  # atomic: another process sees all of it or nothing
    return target


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("QUASIDIAG_CACHE") or Path(base) / "quasidiag")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def usable(size: int, *tensors: Tensor | None) -> bool:
    """Whether these are plain, dense float32 numbers on the CPU, and enough of them."""
    if size < LEAST:
        return False
    for t in tensors:
        if t is not None and not (
            type(t) in (Tensor, torch.nn.Parameter)
            and t.dtype is torch.float32
            and t.device.type == "cpu"
            and t.is_contiguous()
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
    """Solve (``reductions.quasi_diagonal``) and, with what is given, write ``w``, follow momentum and step."""
    groups = [pair or (None, None) for pair in (w, buffers, thetas)]
    outputs = [t for pair in groups for t in pair]
    if not usable(mii.numel(), m00, m0i, mii, v0, vi, shift, *outputs):
        return False
    rows, n = mii.shape
    point = torch.zeros(n) if shift is None else shift
    _call(
        "qd_quasi_diagonal",
        *(ctypes.c_int64(rows), ctypes.c_int64(n)),
        *map(_pointer, (m00, m0i, mii, v0, vi, point)),
        ctypes.c_int(shift is not None),
        ctypes.byref(_rule(rule)),
        *map(_pointer, outputs),
    )
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
    """The same for the diagonal reduction (``reductions.diagonal``) of several parameters."""
    none = [None] * len(moments)
    lists: list[Sequence[Tensor | None]] = [moments, gradients, w or none, buffers or none]
    lists.append(thetas or none)
    if not usable(sum(m.numel() for m in moments), *(t for tensors in lists for t in tensors)):
        return False
    for m, v, *outputs in zip(*lists):
        assert m is not None and v is not None
        _call(
            "qd_diagonal",
            ctypes.c_int64(m.numel()),
            *map(_pointer, (m, v)),
            ctypes.byref(_rule(rule)),
            *map(_pointer, outputs),
        )
    return True


def square(delta: Tensor, scale: float | Tensor = 1.0, onto: Tensor | None = None) -> Tensor | None:
    """``(scale·delta)²`` as ``moments.square`` has it, or added to what is there already."""
    if not usable(delta.numel(), delta, onto):
        return None
    out = torch.empty_like(delta) if onto is None else onto
    _call(
        "qd_square",
        ctypes.c_int64(delta.numel()),
        _pointer(delta),
        ctypes.c_float(float(scale)),
        ctypes.c_float(smallest(delta.dtype)),
        ctypes.c_int(onto is not None),
        _pointer(out),
    )
    return out


def centre(a: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """``a - shift`` and its square, of ``a: [rows, n]``."""
    if a.dim() != 2 or not usable(a.numel(), a, shift):
        return None
    centred = None if shift is None else torch.empty_like(a)
    squared = torch.empty_like(a)
    _call(
        "qd_centre",
        *map(ctypes.c_int64, a.shape),
        *map(_pointer, (a, shift, centred, squared)),
    )
    return (a if centred is None else centred), squared


def _rule(rule: Rule) -> _Rule:
    return _Rule(*map(float, rule))


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _call(name: str, *arguments: object) -> None:
    compiled = library()
    assert compiled is not None
    getattr(compiled, name)(*arguments, ctypes.c_int(torch.get_num_threads()))
