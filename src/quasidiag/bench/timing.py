"""Interleaved timing: every round times every contender once, so that all are timed under the same conditions."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Call = Callable[[], object]

#: The approximate length of a turn, in milliseconds.
TURN = 300.0
#: Options of ``mallopt``, from ``malloc.h``.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass
class Timing:
    """Milliseconds per step and ratios to the base, over the rounds: medians, least time, and quartiles of the ratio."""

    median_ms: float
    least_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ratio_of_least: float
    rounds: int


def interleaved(
    calls: Mapping[str, Call],
    base: str,
    rounds: int,
    repeat: int,
    device: torch.device,
    busy: bool = False,
) -> dict[str, Timing]:
    """Time every contender in each of ``rounds`` rounds, between two turns of the base, ``repeat`` calls a turn.

    The ratio is the median over rounds of a contender's time to the base's *right before and after*, because a slow
    moment of the machine affects both; the quartiles are its spread. A turn that other processes disturbed is repeated,
    up to a limit. With ``busy``, for a machine that others use all the time, the processor time of this process is
    counted instead of wall time, and nothing is repeated.
    """
    clock = _clock(device, busy)
    repeats = {name: _repeat(name, clock(call, 1), repeat) for name, call in calls.items()}

    def turn(name: str) -> float:
        calls[name]()  # not timed: refills the caches, which others have used meanwhile
        return clock(calls[name], repeats[name])

    times: dict[str, list[float]] = {name: [] for name in calls}
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    patience = rounds * len(calls)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            before = turn(base)
            for name in calls:
                if name == base:
                    continue
                others = Others()
                taken, after = turn(name), turn(base)
                while others.disturbed() and patience and not busy:
                    patience -= 1
                    time.sleep(0.2)
                    before, others = turn(base), Others()
                    taken, after = turn(name), turn(base)
                times[name].append(taken)
                ratios[name].append(2 * taken / (before + after))
                times[base].append(after)
                ratios[base].append(1.0)
                before = after
    finally:
        gc.enable()
    if len(calls) == 1:
        times[base], ratios[base] = [before], [1.0]
    least = min(times[base])
    return {name: _summary(times[name], ratios[name], least) for name in calls}


def _repeat(name: str, ms: float, repeat: int) -> int:
    """Calls per turn: fewer for slow contenders, except those that do part of their work only every few steps."""
    comes_round = "every" in name or "auto" in name
    return repeat if comes_round else max(1, min(repeat, round(TURN / ms)))


class Others:
    """How much processor time other processes use, from the creation of this object on."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), self._all(), time.process_time()

    @staticmethod
    def _all() -> float:
        """Seconds that processors were busy or taken away by a hypervisor, summed over all of them."""
        try:
            with open("/proc/stat") as file:
                user, nice, system, _, _, *rest = map(int, file.readline().split()[1:9])
        except (OSError, ValueError):
            return time.process_time()  # unknown: only this process counts
        return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")

    def disturbed(self) -> bool:
        """Whether others used more than a tenth of a processor; within 0.1 s it cannot be told, and is taken to be false."""
        wall = time.perf_counter() - self._start
        return (
            wall > 0.1 and self._all() - self._busy - (time.process_time() - self._own) > 0.1 * wall
        )


def _summary(values: list[float], ratios: list[float], least: float) -> Timing:
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Timing(
        median_ms=statistics.median(values),
        least_ms=min(values),
        ratio=statistics.median(ratios),
        ratio_low=low,
        ratio_high=high,
        ratio_of_least=min(values) / least,
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
    """A function that replays ``call`` as a CUDA graph, which is captured after a few ordinary calls."""
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
    """The most memory that one call allocates beyond what was allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs its starts and stops
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    held = most = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def prepare() -> None:
    """Make the C library keep freed memory, and flush denormal numbers to zero, for all contenders.

    By default the C library may return freed memory to the system and request it again, at a page fault every 4 KiB;
    whether it does depends on the layout of the heap, and makes a step take a fifth longer in one process than in
    another. And training on one minibatch again and again saturates units, whose gradients become denormal numbers,
    with which some processors take twenty times as long.
    """
    torch.set_flush_denormal(True)
    with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        libc.mallopt(_M_MMAP_MAX, 0)


def multiplications_per_ms(a: Tensor, b: Tensor, busy: bool = False, rounds: int = 10) -> float:
    """Multiplications per millisecond in the product ``a @ b``, the best of ``rounds`` measurements."""
    clock = _clock(a.device, busy)
    out = a @ b
    best = min(clock(lambda: torch.mm(a, b, out=out), 3) for _ in range(rounds))
    return a.shape[0] * a.shape[1] * b.shape[1] / best


def bytes_per_ms(size: int, device: torch.device, busy: bool = False, rounds: int = 10) -> float:
    """Bytes that a copy reads and writes per millisecond, the best of ``rounds`` measurements."""
    clock = _clock(device, busy)
    source, target = torch.rand(2, size // 4, device=device).unbind()
    best = min(clock(lambda: target.copy_(source), 3) for _ in range(rounds))
    return 2 * size / best
