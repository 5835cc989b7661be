"""Runs a preset (races, curves, and the update alone) and returns the results as one plain dictionary."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quasidiag import kernels, reductions
from quasidiag.bench import floor, timing
from quasidiag.bench.contenders import Make, Step
from quasidiag.bench.presets import Curve, Preset, Race
from quasidiag.bench.workloads import Workload
from quasidiag.kernels.rule import Rule

Say = Callable[[str], None]
#: Contenders whose first step takes more seconds than this are left out. On a CPU without bfloat16 a step of Muon takes
#: three hundred times SGD's.
LONGEST = 5.0


def run(
    preset: Preset, peers: Mapping[str, Make], rounds: int | None, say: Say, busy: bool = False
) -> dict[str, Any]:
    """Measure everything that the preset asks for; with ``busy``, in processor time, on one thread."""
    device = torch.device(preset.device)
    timing.prepare()
    if busy:
        torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine(device), "races": [], "curves": []}
    results["clock"] = "processor" if busy else "wall"
    results["update"] = update(preset.update, device, busy)
    for item in preset.races:
        results["races"].append(race(item, {}, rounds, say, busy))
    if peers:
        add_peers(results, preset, peers, rounds, say, busy)
    for curve in preset.curves:
        results["curves"].append(_curve(curve, rounds, say, busy))
    return results


def add_peers(
    results: dict[str, Any],
    preset: Preset,
    peers: Mapping[str, Make],
    rounds: int | None,
    say: Say,
    busy: bool = False,
) -> None:
    """Time the peers beside a few of ours, and put the result after the other races, replacing an earlier one."""
    timing.prepare()
    found = race(beside_others(preset.races[0]), peers, rounds, say, busy)
    others = [known for known in results["races"] if known["workload"] != found["workload"]]
    results["races"] = [*others, found]


def beside_others(item: Race) -> Race:
    """``item`` with few of ours and fewer rounds, because a step of some peers takes as long as thirty of SGD's."""
    few = {name: item.contenders[name] for name in (item.base, "QDOP", "QDMCNat", "QDNat")}
    return replace(item, contenders=few, rounds=5, title="beside other packages")


def race(
    item: Race, peers: Mapping[str, Make], rounds: int | None, say: Say, busy: bool = False
) -> dict[str, Any]:
    """Time all contenders on one workload; those that fail are left out, with the reason in ``failed``."""
    workload = item.workload()
    classes = _classes(workload)
    calls, steps, failed = _prepare(workload, {**item.contenders, **peers}, item.first)
    say(f"{workload.name}: {len(calls)} contenders")
    times = timing.interleaved(
        calls, item.base, rounds or item.rounds, item.repeat, workload.device, busy
    )
    rates = _rates(workload, busy)
    base_floor = floor.of("SGD", workload, classes)
    assert base_floor is not None
    base_bytes = _peak(steps[item.base], workload)
    entries: dict[str, Any] = {}
    for name, t in times.items():
        entry: dict[str, Any] = asdict(t)
        counted = floor.of(name, workload, classes)
        if counted is not None:
            entry["floor_multiplications"] = counted.multiplications / base_floor.multiplications
            entry["floor_ms"] = counted.ms(rates)
            entry["floor"] = counted.ms(rates) / base_floor.ms(rates)
        if isinstance(steps[name], Step):
            entry["state_bytes_per_parameter"] = steps[name].state_bytes() / _size(workload)
            entry["peak_bytes_over_base"] = _peak(steps[name], workload) - base_bytes
        entries[name] = entry
    return {
        "workload": ", ".join(filter(None, (workload.name, item.title))),
        "base": item.base,
        "parameters": _size(workload),
        "multiplications_per_ms": rates[0],
        "bytes_per_ms": rates[1],
        "contenders": entries,
        "failed": failed,
    }


def _prepare(
    workload: Workload, makes: Mapping[str, Make], first: int = 3
) -> tuple[dict[str, timing.Call], dict[str, Any], dict[str, str]]:
    calls: dict[str, timing.Call] = {}
    steps: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, make in makes.items():
        try:
            step = make(workload)
            start = time.perf_counter()
            step()
            took = time.perf_counter() - start
            if took > LONGEST:
                failed[name] = f"left out, its first step took {took:.0f} s"
                continue
            for _ in range(first - 1):
                step()
            calls[name] = (
                timing.captured(step, partial(_generators, step)) if workload.graph else step
            )
            steps[name] = step
        except Exception as error:  # a peer may fail in any way, which is reported
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    return calls, steps, failed


def _generators(step: Any) -> list[torch.Generator]:
    collector: Any = getattr(step.optimizer, "_collector", None)
    generator = getattr(collector, "generator", None)
    return [] if generator is None else [generator]


def _peak(step: Any, workload: Workload) -> int:
    return 0 if workload.graph else timing.peak_bytes(step, workload.device)


def _curve(curve: Curve, rounds: int | None, say: Say, busy: bool) -> dict[str, Any]:
    points: dict[str, list[list[float]]] = {name: [] for name in curve.contenders}
    for size, make in curve.workloads.items():
        workload = make()
        say(f"cost against {curve.axis}: {size}")
        calls, _, _ = _prepare(workload, curve.contenders)
        times = timing.interleaved(
            calls, "SGD", rounds or curve.rounds, curve.repeat, workload.device, busy
        )
        for name, t in times.items():
            points[name].append([size, t.median_ms, t.least_ms, t.ratio])
    return {"axis": curve.axis, "points": points}


def update(shape: tuple[int, int], device: torch.device, busy: bool = False) -> dict[str, Any]:
    """Time the update of one layer alone (solve and parameter step); its bandwidth is a share of a copy's."""
    rows, n = shape
    g = torch.Generator(device).manual_seed(0)

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=g, device=device) + 0.5

    m00, m0i, shift, v0, theta0 = rand(rows), rand(rows, n), rand(n), rand(rows), rand(rows)
    mii, vi, theta = m0i.square() / m00[:, None] + rand(rows, n), rand(rows, n), rand(rows, n)
    rule = Rule(lr=1e-6)

    def fast() -> None:
        kernels.quasi_diagonal(m00, m0i, mii, v0, vi, shift, rule, thetas=(theta0, theta))

    def eager() -> None:
        w0, wi = reductions.quasi_diagonal(m00, m0i, mii, v0, vi, shift=shift)
        theta0.add_(w0, alpha=-1e-6)
        theta.add_(wi, alpha=-1e-6)

    fused = kernels.quasi_diagonal(m00, m0i, mii, v0, vi, shift, rule, thetas=(theta0, theta))
    calls = {"eager": eager, **({"fused": fast} if fused else {})}
    times = timing.interleaved(calls, "eager", 21, 5, device, busy)
    copy = timing.bytes_per_ms(rows * n * 4 * 2, device, busy)
    # Five numbers of four bytes per weight: two of the metric and the gradient are read, the parameter read and written.
    moved = 20.0 * rows * n
    entries = {
        name: {"median_ms": t.median_ms, "share_of_copy": moved / t.median_ms / copy}
        for name, t in times.items()
    }
    return {"shape": list(shape), "copy_bytes_per_ms": copy, "kernels": entries}


def _rates(workload: Workload, busy: bool) -> tuple[float, float]:
    """Measured rates per millisecond: multiplications in a product of the workload's size, and bytes of a copy."""
    dtype = workload.autocast or torch.float32
    rows = workload.target.numel()
    width = max(max(p.shape) for p in workload.model.parameters() if p.dim() == 2)
    width = min(width, 8192)
    a = torch.rand(rows, width, device=workload.device).to(dtype)
    b = torch.rand(width, width, device=workload.device).to(dtype)
    size = min(4 * _size(workload), 2**30)
    return (
        timing.multiplications_per_ms(a, b, busy),
        timing.bytes_per_ms(size, workload.device, busy),
    )


def _classes(workload: Workload) -> int:
    with torch.no_grad(), workload.precision():
        return workload.model(workload.x[:1]).shape[-1]


def _size(workload: Workload) -> int:
    return sum(p.numel() for p in workload.model.parameters())


def machine(device: torch.device) -> dict[str, Any]:
    """The hardware and software on which it is measured."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    found = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found
