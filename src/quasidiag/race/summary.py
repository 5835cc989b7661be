"""The results of the race: steps and time to given losses, final losses, and ours at other factors and batch sizes.

Losses are measured after each of the first steps, then less and less often; between two measurements they are
interpolated linearly, for all contenders alike.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from quasidiag.experiments.runs import Line, write_atomically

from .contenders import CONTENDERS, OURS
from .plan import Plan
from .tasks import FACTORS, ROBUSTNESS, RaceConfig, find
from .timing import Pace, elapsed
from .train import EVERY_ONE

REFERENCE = "AdamW"
#: Contenders are compared by the time to the losses of the slowest one (with the highest final loss) at these fractions
#: of its run.
PARTS = (0.1, 0.5, 1.0)

Curve = dict[str, list[float]]
Timing = dict[str, dict[str, Any]]


def mean_curve(runs: Sequence[Sequence[Line]], key: str) -> Curve:
    """The mean, lowest and highest loss over seeds, at those epochs (also fractions) where every run measured it."""
    points = [_points(run, key) for run in runs]
    epochs = sorted(set.intersection(*(set(seen) for seen in points)))
    values = [[seen[epoch] for seen in points] for epoch in epochs]
    return {
        "epoch": epochs,
        "loss": [fmean(at) for at in values],
        "low": [min(at) for at in values],
        "high": [max(at) for at in values],
    }


def _points(run: Sequence[Line], key: str) -> dict[float, float]:
    """The loss of a run by epoch, including fractions of an epoch where it was measured."""
    between = {epoch: loss for line in run for epoch, loss in line.get("within") or []}
    return between | {float(line["epoch"]): line[key] for line in run}


def unseen(runs: Sequence[Sequence[Line]], key: str) -> dict[str, float | None]:
    """Means over seeds on validation data: the lowest loss after any epoch, the last loss, and the last error.

    None where a seed has no such number.
    """
    losses = [_finite(line[key] for line in run) for run in runs]
    return {
        "lowest": _mean([min(some, default=None) for some in losses]),
        "final": _mean([run[-1][key] for run in runs]),
        "errors": _mean([run[-1]["valid_error"] for run in runs]),
    }


def _finite(values: Iterable[float | None]) -> list[float]:
    return [x for x in values if x is not None and math.isfinite(x)]


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None if one is missing or not finite."""
    known = _finite(values)
    return fmean(known) if known and len(known) == len(values) else None


def reached(curve: Curve, level: float) -> float | None:
    """The epoch at which a curve first comes down to ``level``, interpolated; None if it never does."""
    previous: tuple[float, float] | None = None
    for epoch, loss in zip(curve["epoch"], curve["loss"]):
        if loss <= level:
            if previous is None:
                return epoch
            before, above = previous
            return before + (epoch - before) * (above - level) / (above - loss)
        previous = (epoch, loss)
    return None


def at(curve: Curve, epoch: float) -> float:
    """The loss at an epoch, interpolated; after the end of the curve, its last loss."""
    pairs = list(zip(curve["epoch"], curve["loss"]))
    for (e0, l0), (e1, l1) in pairwise(pairs):
        if e0 <= epoch <= e1:
            return l0 + (l1 - l0) * (epoch - e0) / (e1 - e0)
    return pairs[-1][1]


def summarise(plan: Plan, timing: Timing | None = None) -> dict[str, Any]:
    """The results of one task, ready for JSON. ``timing`` has, by task, the pace of each contender."""
    task = find(plan.experiment.name)
    rows: dict[str, dict[str, Any]] = {}
    seen: list[list[Line]] = []
    for algorithm in (a for a in CONTENDERS if a in plan.algorithms):
        schedule, lr = plan.chosen(algorithm) or ("", 0.0)
        runs = plan.curves(schedule, algorithm, lr) if schedule else []
        seen += runs
        if runs:
            tried = [entry for entry in plan.tried(algorithm) if entry["status"] != "missing"]
            rows[algorithm] = {
                "contender": algorithm,
                "schedule": schedule,
                "lr": lr,
                "seeds": len(runs),
                "trials": 1 if algorithm == OURS else len(tried),
                "curve": mean_curve(runs, task.select),
                "unseen": unseen(runs, task.select.replace("train", "valid")),
            }
    config = plan.config("constant", OURS, 1.0)
    steps = _steps_per_epoch(seen)
    _compare(rows, steps, (timing or {}).get(task.name))
    return {
        "task": task.name,
        "title": task.title,
        "kind": task.kind,
        "loss": task.select,
        "dataset": plan.dataset,
        "layers": list(task.layers),
        "scale": plan.scale,
        "device": plan.device,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "steps_per_epoch": steps,
        "timing": (timing or {}).get(task.name),
        "contenders": list(rows.values()),
        "tried": {a: plan.tried(a) for a in CONTENDERS if a in plan.algorithms and a != OURS},
        "robustness": _robustness(plan, rows) if plan.robustness else None,
    }


def _steps_per_epoch(runs: Sequence[Sequence[Line]]) -> int:
    """Steps per epoch, found without the data: from the fractions of an epoch kept with the losses of the first steps.

    A loss that was not finite is missing and makes the count too small, so the largest count of all runs is taken.
    """
    counts = [0]
    for run in runs:
        first = [epoch for line in run for epoch, _ in line.get("within") or []][:EVERY_ONE]
        counts += [round(len(first) / first[-1])] if first else []
    return max(counts)


def _compare(rows: dict[str, dict[str, Any]], steps: int, timing: dict[str, Any] | None) -> None:
    """Add to each row its losses, and the steps and seconds to the reference's final loss and to the levels."""
    if not rows:
        return
    slowest = max(rows.values(), key=lambda row: row["curve"]["loss"][-1])
    last = slowest["curve"]["epoch"][-1]
    levels = {str(part): at(slowest["curve"], part * last) for part in PARTS}
    reference = rows.get(REFERENCE)
    for name, row in rows.items():
        curve = row["curve"]
        row["first"], row["final"] = at(curve, 1.0), curve["loss"][-1]
        pace: Pace | None = (timing or {}).get(name)
        row["seconds_per_step"] = None if pace is None else pace["then"]
        row["to_reference"] = row["ratio"] = None
        if reference is not None:
            epoch = reached(curve, reference["curve"]["loss"][-1])
            total = reference["curve"]["epoch"][-1]
            row["to_reference"] = None if epoch is None else round(epoch * steps)
            row["ratio"] = None if epoch is None else epoch / total
        row["levels"] = {}
        for part, level in levels.items():
            epoch = reached(curve, level)
            row["levels"][part] = {
                "loss": level,
                "steps": None if epoch is None else round(epoch * steps),
                "seconds": None if epoch is None or pace is None else elapsed(pace, epoch * steps),
            }


def _robustness(plan: Plan, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours at other factors, minibatch sizes and shares, beside its untuned loss after the same number of epochs."""
    found = []
    for variant in ROBUSTNESS:
        for lr in FACTORS if variant == "factor" else (1.0,):
            config = RaceConfig.from_dict(plan.config(variant, OURS, lr).to_dict())
            result = plan.result(config)
            if result is not None:
                own = rows.get(OURS)
                found.append(
                    {
                        "factor": lr,
                        "batch_size": config.batch_size,
                        "share": config.options.get("metric_fraction"),
                        "epochs": config.epochs,
                        "status": result["status"],
                        "loss": result["final"].get(plan.experiment.select),
                        "default": None if own is None else at(own["curve"], config.epochs),
                    }
                )
    return found


def write(summaries: Sequence[dict[str, Any]], out: Path) -> None:
    """``summary.json`` with everything, ``summary.csv`` and ``tables.md`` with the results."""
    out.mkdir(parents=True, exist_ok=True)
    # Rounded before the tables are made, so that they agree with the file.
    summaries = [_rounded(summary) for summary in summaries]
    lines = [json.dumps(s, allow_nan=False, separators=(",", ":")) for s in summaries]
    text = "[\n" + ",\n".join(lines) + "\n]\n"  # one line per task
    write_atomically(out / "summary.json", lambda path: path.write_text(text))
    rows = [row for summary in summaries for row in _flat(summary)]
    if rows:
        with (out / "summary.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    from .tables import tables

    (out / "tables.md").write_text(tables(summaries), encoding="utf-8")


def _rounded(value: Any) -> Any:
    """``value`` with all its floats rounded to six significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _flat(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "task": summary["task"],
            "contender": row["contender"],
            "schedule": row["schedule"],
            "lr": row["lr"],
            "trials": row["trials"],
            "seeds": row["seeds"],
            "epochs": summary["epochs"],
            "steps": summary["epochs"] * summary["steps_per_epoch"],
            "loss_epoch_1": _short(row["first"]),
            "loss_final": _short(row["final"]),
            "validation_lowest": _short(row["unseen"]["lowest"]),
            "validation_final": _short(row["unseen"]["final"]),
            "steps_to_adamw_final": row["to_reference"],
            "ratio_to_adamw_steps": _short(row["ratio"]),
            "seconds_per_step": _short(row["seconds_per_step"]),
            **{
                f"{what}_to_{part}": _short(level[what])
                for part, level in row["levels"].items()
                for what in ("steps", "seconds")
            },
        }
        for row in summary["contenders"]
    ]


def _short(value: float | None) -> float | str:
    return "" if value is None else float(f"{value:.5g}")
