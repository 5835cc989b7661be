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

#: Milliseconds that a turn should take, about.
TURN = 300.0
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
    """Time every contender in each of ``rounds`` rounds, between two turns of the base, ``repeat`` calls a turn.

    The ratio is the median over rounds of a contender's time over the base's *right before and after*, with the
    quartiles as its spread: a slow moment of the machine hits both. A turn that others disturbed is taken again. Where
    others keep the machine ``busy`` all the time, count the processor time of this process in place of the wall's.
    """
    clock = _clock(device, busy)
    repeats = {name: _repeat(name, clock(call, 1), repeat) for name, call in calls.items()}

    def turn(name: str) -> float:
        calls[name]()  # the others have had the caches meanwhile, longer or shorter
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
    """Calls a turn: fewer of slow ones, unless what they do comes round only every so many steps."""
    comes_round = "every" in name or "auto" in name
    return repeat if comes_round else max(1, min(repeat, round(TURN / ms)))


class Others:
    """What other processes do to this machine's processors from now on."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.perf_counter(), self._all(), time.process_time()

    @staticmethod
    def _all() -> float:
        """Seconds that all processors were busy, or taken away by a hypervisor."""
        try:
            with open("/proc/stat") as file:
                user, nice, system, _, _, *rest = map(int, file.readline().split()[1:9])
        except (OSError, ValueError):
            return time.process_time()  # nobody can say
        return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")

    def disturbed(self) -> bool:
        """Whether they took more than a tenth of a processor; in less than a tenth of a second nobody can tell."""
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


def prepare() -> None:
    """Have the C library keep what is freed, and denormal numbers be zero, for everybody that is timed.

    It would else return some of it to the system and ask again, with a page fault every 4 KiB, or not, as the heap
    happens to lie: the same step then takes a fifth longer in one process than in another. And units that saturate, as
    training goes on and on with one minibatch, have denormal gradients, which on some processors take twenty times as long.
    """
    torch.set_flush_denormal(True)
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
