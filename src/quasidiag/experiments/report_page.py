"""Converts records into what the page shows: charts as data, tables as rows, pictures as data URIs."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .algorithms import ALGORITHMS
from .report_runs import (
    VARIANT_NAMES,
    VARIANTS,
    Line,
    Record,
    lines,
    mean_curve,
    rank,
)
from .tasks import EXPERIMENTS, SCALES

NOTES = {
    "inversion": "Each algorithm at its two best step sizes on the pixels as given.",
    "dropout": "The step size is chosen by the validation loss.",
    "sparse": "Each unit has ten random inputs; only the last layer is dense.",
    "eeg": "A public recording stands in for the paper's private one.",
    "mnist-ae": "The standard deviation of each pixel is learned, and at least 1/256.",
}

NLL: dict[str, Any] = {
    "key": "nll",
    "label": "Negative log-likelihood",
    "short": "NLL",
    "unit": "nats",
}
MISSES: dict[str, Any] = {
    "key": "error",
    "label": "Classification error",
    "short": "error",
    "unit": "%",
    "scale": 100,
}
SQUARES: dict[str, Any] = {
    "key": "error",
    "label": "Half squared error",
    "short": "error",
    "unit": "per sample",
}


def quantities(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The quantities to draw, the main one first; no NLL for a fixed Gaussian, where it is the error plus a constant."""
    output = next((str(run.config.get("output")) for run in records), "categorical")
    return {"gaussian": [SQUARES], "learned-gaussian": [NLL, SQUARES]}.get(output, [NLL, MISSES])


def plotted(line: Line, all_lines: Sequence[Line]) -> dict[str, float]:
    """The step sizes of ``line`` to draw: the ``best``, and for the inversion the two best of the original pixels."""
    if line.task.experiment == "inversion":
        as_given = (line.task._replace(variant="original"), line.algorithm)
        same = (other for other in all_lines if (other.task, other.algorithm) == as_given)
        ranking = next(same, line).ranking
        tried = zip(("best", "second"), ranking, strict=False)
        return {name: lr for name, lr in tried if lr in line.steps}
    return {} if line.best is None else {"best": line.best}


def _numbers(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def chart(section_lines: Sequence[Line]) -> dict[str, Any]:
    """The curves of one experiment, as data for the page's script."""
    records = [record for line in section_lines for record in line.records]
    shown = quantities(records)
    curves = []
    for line in section_lines:
        for step, lr in plotted(line, section_lines).items():
            runs = [run for run in line.at(lr) if not run.diverged]
            if not runs:
                continue
            curve: dict[str, Any] = {
                "algorithm": line.algorithm,
                "variant": line.task.variant,
                "step": step,
                "lr": lr,
                "seeds": len(runs),
                "epoch": _numbers(mean_curve(runs, "epoch")[0]),
                "seconds": _numbers(mean_curve(runs, "seconds")[0]),
            }
            for side in ("train", "valid"):
                for quantity in shown:
                    mean, low, high = mean_curve(runs, f"{side}_{quantity['key']}")
                    values = {"mean": _numbers(mean)}
                    if len(runs) > 1:
                        values |= {"low": _numbers(low), "high": _numbers(high)}
                    curve[f"{side}_{quantity['key']}"] = values
            curves.append(curve)
    return {
        "quantities": shown,
        "algorithms": _present([c["algorithm"] for c in curves], ALGORITHMS),
        "variants": _present([c["variant"] for c in curves], VARIANTS),
        "names": VARIANT_NAMES,
        "steps": _present([c["step"] for c in curves], ("best", "second")),
        "curves": curves,
    }


def _present(names: Sequence[str], order: Sequence[str]) -> list[str]:
    return sorted(set(names), key=lambda name: rank(name, order))


def step_table(section_lines: Sequence[Line]) -> dict[str, Any]:
    """The table of step sizes: each algorithm's results at its best one, and the final loss at all that were tried."""
    shown = quantities([record for line in section_lines for record in line.records])
    leading = shown[0]
    columns = [("Training", "train", leading), ("Validation", "valid", leading)]
    columns += [("Validation", "valid", quantity) for quantity in shown[1:]]
    steps = sorted({lr for line in section_lines for lr in line.steps})
    variants: dict[str, list[dict[str, Any]]] = {}
    for line in section_lines:
        cells = [_cell(line, lr, f"train_{leading['key']}") for lr in steps]
        finals = [over_seeds(line, side, quantity) for _, side, quantity in columns]
        row = {"line": line, "finals": finals, "cells": cells}
        variants.setdefault(line.task.variant, []).append(row)
    titles = [f"{title} {quantity['short']}" for title, _, quantity in columns]
    return {"steps": steps, "titles": titles, "variants": variants}


def _cell(line: Line, lr: float, name: str) -> dict[str, Any]:
    """The table cell of one step size: its final value on the grid's seed; the three best are shaded."""
    run = next((run for run in line.at(lr) if run.seed == line.grid_seed), None)
    if run is None:
        return {"kind": "none", "text": "", "shade": 0}
    if lr not in line.ranking:
        return {"kind": "diverged", "text": "×", "shade": 0}
    kind, shade = "best" if lr == line.best else "tried", max(0, 21 - 7 * line.ranking.index(lr))
    return {"kind": kind, "text": f"{run.final(name):.3g}", "shade": shade}


def over_seeds(line: Line, side: str, quantity: dict[str, Any]) -> tuple[str, str]:
    """The final value at the best step size as text: its mean over seeds, and its ± standard deviation with the unit."""
    scale, unit = quantity.get("scale", 1), quantity["unit"] if "scale" in quantity else ""
    finals = line.finals(f"{side}_{quantity['key']}")
    values = [scale * value for value in finals if math.isfinite(value)]
    if not values:
        return "–", ""
    spread = f" ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.3g}", f"{spread} {unit}".rstrip()


def picture_rows(section_lines: Sequence[Line]) -> list[dict[str, Any]]:
    """A row of inputs, then a row of reconstructions for each algorithm at its best step size."""
    rows: list[dict[str, Any]] = []
    for line in section_lines:
        pictures = line.chosen[0].pictures if line.chosen else None
        if pictures is None:
            continue
        count = len(pictures.inputs)
        if not rows:
            rows = [{"name": "Input", "error": None, "uri": strip(pictures.inputs), "count": count}]
        error, uri = float(pictures.errors().mean()), strip(pictures.outputs)
        rows.append({"name": line.algorithm, "error": error, "uri": uri, "count": count})
    return rows


def strip(images: np.ndarray, gap: int = 2) -> str:
    """Grey pictures side by side in one PNG, with transparent gaps, as a data URI."""
    from PIL import Image

    count, height, width = images.shape
    canvas = np.zeros((height, count * (width + gap) - gap, 2), dtype=np.uint8)
    for place, image in enumerate(images):
        left = place * (width + gap)
        canvas[:, left : left + width, 0] = image
        canvas[:, left : left + width, 1] = 255
    buffer = io.BytesIO()
    Image.fromarray(canvas, "LA").save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def sections(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The sections of the page: every experiment of the paper, then any others that were run, each with its content."""
    every = lines(records)
    heads = [(e.name, e.paper, e.title, "-".join(map(str, e.layers))) for e in EXPERIMENTS]
    others = {line.task.experiment for line in every} - {e.name for e in EXPERIMENTS}
    heads += [(name, "", name, "") for name in sorted(others)]
    shown = []
    for name, paper, title, layers in heads:
        own = [line for line in every if line.task.experiment == name]
        runs = [record for line in own for record in line.records]
        text = f"Network {layers}. {NOTES.get(name, '')}" if layers else ""
        content = {"chart": chart(own), "steps": step_table(own), "pictures": picture_rows(own)}
        head = {"name": name, "paper": paper, "title": title, "text": text}
        shown.append({**head, "lines": own, "facts": facts(runs), **content})
    return shown


def facts(records: Sequence[Record]) -> list[str]:
    """What the runs of one experiment have in common, in a few words each."""
    if not records:
        return []

    def values(key: str) -> list[Any]:
        return sorted({run.config[key] for run in records if run.config.get(key) is not None})

    diverged = sum(run.diverged for run in records)
    seeds = len({run.seed for run in records})
    epochs = max(run.epochs for run in records)
    texts = [f"{len(records)} run{'s' * (len(records) > 1)}"]
    texts += [f"{diverged} diverged"] if diverged else []
    texts += [f"{epochs} epoch{'s' * (epochs != 1)}"]
    texts += [f"up to {seeds} seeds" if seeds > 1 else "1 seed"]
    texts += [f"batch {'/'.join(map(str, values('batch_size')))}"] if values("batch_size") else []
    texts += [f"data {', '.join(values('dataset'))}"] if values("dataset") else []
    names = _present(values("scale"), SCALES)
    texts += [f"{'/'.join(names)} scale"] if names else []
    devices = sorted({str(run.environment.get("device_name", "")) for run in records} - {""})
    return texts + devices
