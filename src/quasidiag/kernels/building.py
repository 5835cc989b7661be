"""Compiles the C files in this folder, at first use.

The system's C compiler runs once (two seconds), and the result is kept in the user's cache; ``QUASIDIAG_CACHE`` in the
environment says where.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

from quasidiag.cache import cache_folder

SOURCES = "native", "orthogonal", "tiles", "direction", "products"
#: What the compiler is told about a processor, by what torch calls it.
FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}


def built(compiler: str) -> Path:
    """The shared library for this processor, from the cache if it is there."""
    folder = Path(__file__).parent
    sources = [folder / f"{name}.c" for name in SOURCES]
    capability = torch.backends.cpu.get_cpu_capability()
    flags = ["-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
    flags += ["-fPIC", *FLAGS.get(capability, [])]
    runtime = _openmp()
    key = " ".join([platform.machine(), compiler, *flags, runtime]).encode()
    key += b"".join(path.read_bytes() for path in [*sources, *sorted(folder.glob("*.h"))])
    name = f"native-{hashlib.sha256(key).hexdigest()[:16]}.so"
    cache = cache_folder()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = cache / name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built, objects = Path(scratch) / name, [f"{path.stem}.o" for path in sources]
            compiling = [*shlex.split(compiler), "-c", *flags, *map(str, sources)]
            try:
                _run(compiling, scratch)
            except (
                subprocess.CalledProcessError
            ):  # perhaps the assembler is older than the compiler
                _run([*compiling, "-DNO_AMX"], scratch)
            _run([*shlex.split(compiler), "-shared", *objects, runtime, "-lm", "-o", name], scratch)
            built.replace(target)  # atomic: another process sees all of it or nothing
    return target


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=folder)


def _openmp() -> str:
    """The OpenMP library that torch uses, as a linker argument: the threads of a second one would compete with torch's."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = sorted({path for line in maps if "libgomp" in (path := line.split(maxsplit=5)[-1])})
    torchs = [path for path in loaded if {"torch", "torch.libs"} & {*Path(path).parts[-3:]}]
    return (torchs or loaded or ["-lgomp"])[0]
