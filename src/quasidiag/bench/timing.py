"""Interleaved timing: every round times every contender once, so that all of them meet the same machine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

Call = Callable[[], object]

#: Of ``malloc.h``.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass
class Timing:
    """Milliseconds a step, and as a ratio to the base: the median, quartiles and extremes over the rounds."""

    median_ms: float
    least_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ratio_of_least: float
    rounds: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def interleaved(
    calls: Mapping[str, Call],
    base: str,
    rounds: int,
    repeat: int,
    device: torch.device,
    busy: bool = False,
) -> dict[str, Timing]:
    """Time ``repeat`` calls of each contender in each of ``rounds`` rounds.

    The ratio is the median over rounds of a contender's time over the base's *in the same round*, with the quartiles
    as its spread: a slow moment of the machine hits both. Where others keep the machine ``busy``, count the processor
    time of this process in place of the wall's.
    """
    clock = _clock(device, busy)
    for call in calls.values():
        clock(call, repeat)
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(clock(call, repeat))
    finally:
        gc.enable()
    return {name: _summary(values, times[base]) for name, values in times.items()}


def _summary(values: list[float], base: list[float]) -> Timing:
    ratios = [x / y for x, y in zip(values, base)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Timing(
        median_ms=statistics.median(values),
        least_ms=min(values),
        ratio=statistics.median(ratios),
        ratio_low=low,
        ratio_high=high,
        ratio_of_least=min(values) / min(base),
        rounds=len(values),
    )


def _clock(device: torch.device, busy: bool) -> Callable[[Call, int], float]:
    return _cuda_ms if device.type == "cuda" else _cpu_ms if busy else _wall_ms


def _wall_ms(call: Call, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) * 1e3 / repeat


def _cpu_ms(call: Call, repeat: int) -> float:
    start = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - start) * 1e3 / repeat


def _cuda_ms(call: Call, repeat: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def captured(call: Call, generators: Callable[[], list[torch.Generator]]) -> Call:
    """The step as a CUDA graph, after a few plain ones."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        call()

    def replay(held: tuple[torch.cuda.CUDAGraph, Call] = (graph, call)) -> None:
        held[0].replay()

    return replay


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory that one call holds beyond what was there before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it talks of its own starts and stops
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    held = most = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def keep_memory() -> None:
    """Have the C library keep what is freed, for everybody that is timed.

    It would else return some of it to the system and ask again, with a page fault every 4 KiB, or not, as the heap
    happens to lie: the same step then takes a fifth longer in one process than in another.
    """
    with contextlib.suppress(OSError, AttributeError):  # not the GNU C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        libc.mallopt(_M_MMAP_MAX, 0)


def multiplications_per_ms(a: Tensor, b: Tensor, busy: bool = False, rounds: int = 10) -> float:
    """The rate of a matrix product, the best of a few."""
    clock = _clock(a.device, busy)
    out = a @ b
    best = min(clock(lambda: torch.mm(a, b, out=out), 3) for _ in range(rounds))
    return a.shape[0] * a.shape[1] * b.shape[1] / best


def bytes_per_ms(size: int, device: torch.device, busy: bool = False, rounds: int = 10) -> float:
    """What a copy moves, read and written."""
    clock = _clock(device, busy)
    source, target = torch.rand(2, size // 4, device=device).unbind()
    best = min(clock(lambda: target.copy_(source), 3) for _ in range(rounds))
    return 2 * size / best
