"""The paper's figures as PNG and PDF, each with the CSV of the numbers that it draws."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

from .algorithms import ALGORITHMS
from .report_page import plotted, quantities
from .report_runs import VARIANT_NAMES, Line, Record, lines, mean_curve, rank

COLOURS = {
    "SGD": "#6f6f6a",
    "AdaGrad": "#9b4a83",
    "DOP": "#3d9bd6",
    "QDOP": "#00568a",
    "DMCNat": "#c9800a",
    "QDMCNat": "#b03d00",
    "DNat": "#2fa37e",
    "QDNat": "#00634a",
}
OTHER = "#7a5c00"
SIDES = {"train": "Training", "valid": "Validation"}
STYLE: Any = {
    "font.family": "serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e0",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "mathtext.fontset": "dejavuserif",
    "pdf.fonttype": 42,
}


def write(records: Sequence[Record], timing: dict[str, Any], out: Path) -> list[Path]:
    """Draw every figure for which there are runs; returns the files written."""
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    every = lines(records)
    with rc_context(STYLE):
        for name in sorted({line.task.experiment for line in every}):
            own = [line for line in every if line.task.experiment == name]
            for quantity in quantities([run for line in own for run in line.records]):
                stem = out / f"{name}-{quantity['key']}"
                written += _save(curves(own, quantity), stem, curve_rows(own, quantity["key"]))
            written += _save(step_sizes(own), out / f"{name}-steps", step_rows(own))
            if shown := [line for line in own if line.chosen and line.chosen[0].pictures]:
                written += _save(pictures(shown), out / f"{name}-pictures", picture_rows(shown))
        for device, table in timing.items():
            written += _save(bars(table), out / f"timing-{device}", table["rows"])
    return written


def _save(figure: Figure | None, stem: Path, rows: Iterable[dict[str, Any]]) -> list[Path]:
    if figure is None:
        return []
    png, pdf, table = (stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf", "csv"))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is computed once, for both files
    # Without dates the same runs give the same bytes.
    figure.savefig(png, dpi=150, metadata={"Software": None})
    figure.savefig(pdf, metadata={"CreationDate": None, "ModDate": None})
    listed = list(rows)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(listed[0]))
        writer.writeheader()
        writer.writerows(listed)
    return [png, pdf, table]


def _colour(algorithm: str) -> str:
    return COLOURS.get(algorithm, OTHER)


def _drawn(own: Sequence[Line]) -> list[tuple[Line, str, float, list[Record]]]:
    found = [(line, step, lr) for line in own for step, lr in plotted(line, own).items()]
    runs = [[run for run in line.at(lr) if not run.diverged] for line, _, lr in found]
    return [(*what, kept) for what, kept in zip(found, runs, strict=True) if kept]


def curves(own: Sequence[Line], quantity: dict[str, Any]) -> Figure | None:
    """Training above validation, one column for each variant; seeds as a band around their mean."""
    drawn = _drawn(own)
    if not drawn:
        return None
    variants = list(dict.fromkeys(line.task.variant for line, *_ in drawn))
    figure = Figure(figsize=(1.2 + 2.9 * len(variants), 5.2), layout="constrained")
    axes = figure.subplots(2, len(variants), squeeze=False, sharex=True, sharey="row")
    scale = quantity.get("scale", 1)
    for row, (side, title) in enumerate(SIDES.items()):
        drawn_values: list[float] = []
        for line, step, _, runs in drawn:
            axis = axes[row, variants.index(line.task.variant)]
            epochs = mean_curve(runs, "epoch")[0]
            mean, low, high = scale * mean_curve(runs, f"{side}_{quantity['key']}")
            colour = _colour(line.algorithm)
            label = line.algorithm if step == "best" else None
            axis.plot(
                epochs,
                mean,
                color=colour,
                label=label,
                lw=1.8 if line.algorithm.startswith("QD") else 1,
                ls="-" if step == "best" else "--",
                marker="o" if len(epochs) < 6 else None,
                ms=2.5,
            )
            if len(runs) > 1:
                axis.fill_between(epochs, low, high, color=colour, alpha=0.15, lw=0)
            drawn_values += [value for value in mean if np.isfinite(value)]
        axes[row, 0].set_ylabel(f"{title} {quantity['short']} ({quantity['unit']})")
        _logarithmic(axes[row], drawn_values)
    for column, variant in enumerate(variants):
        axes[0, column].set_title(VARIANT_NAMES.get(variant, variant), fontsize=9)
        axes[1, column].set_xlabel("Epoch")
        axes[1, column].xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _legend(figure, axes.ravel())
    return figure


def _logarithmic(axes: Iterable[Axes], values: Sequence[float]) -> None:
    """A logarithmic vertical axis if all values are positive; within two decades also with ticks at 2 and 5."""
    if not values or min(values) <= 0:
        return
    digits = (1.0,) if max(values) > 100 * min(values) else (1.0, 2.0, 5.0)
    for axis in axes:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=digits))
        axis.yaxis.set_minor_locator(NullLocator())
        if len(digits) > 1:
            axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries = {**dict(zip(labels, handles, strict=True)), **entries}
    names = sorted(entries, key=lambda name: rank(name, ALGORITHMS))
    columns = min(4, int(figure.get_figwidth() / 1.3))  # an entry takes 1.3 inches
    figure.legend(
        [entries[name] for name in names], names, loc="outside lower center", ncols=columns
    )


def curve_rows(own: Sequence[Line], key: str) -> Iterable[dict[str, Any]]:
    """One row for each epoch of each run that is drawn."""
    for line, _, lr, runs in _drawn(own):
        for run in runs:
            what = {"variant": line.task.variant, "algorithm": line.algorithm, "lr": lr}
            columns = [run.column(c) for c in ("epoch", "seconds", f"train_{key}", f"valid_{key}")]
            for epoch, seconds, train, valid in zip(*columns, strict=True):
                yield {
                    **what,
                    "seed": run.seed,
                    "epoch": int(epoch),
                    "seconds": round(seconds, 4),
                    f"train_{key}": f"{train:.6g}",
                    f"valid_{key}": f"{valid:.6g}",
                }


def step_sizes(own: Sequence[Line]) -> Figure:
    """Final training loss against step size; diverged runs are crosses above the plot."""
    leading = quantities([run for line in own for run in line.records])[0]
    name = f"train_{leading['key']}"
    variants = list(dict.fromkeys(line.task.variant for line in own))
    figure = Figure(figsize=(1.2 + 2.9 * len(variants), 3.2), layout="constrained")
    axes = figure.subplots(1, len(variants), squeeze=False, sharex=True, sharey=True)[0]
    finite = []
    for line in own:
        axis = axes[variants.index(line.task.variant)]
        grid = sorted((r.lr, r.final(name)) for r in line.records if r.seed == line.grid_seed)
        trained = [(lr, loss) for lr, loss in grid if math.isfinite(loss)]
        finite += [loss for _, loss in trained]
        steps, losses = zip(*trained, strict=True) if trained else ((), ())
        colour = _colour(line.algorithm)
        axis.plot(steps, losses, "o-", color=colour, lw=1.2, ms=3, label=line.algorithm)
        height = 1.02 + 0.02 * rank(line.algorithm, ALGORITHMS)[0]
        for lr in (lr for lr, loss in grid if not math.isfinite(loss)):
            above = axis.get_xaxis_transform()
            axis.plot(lr, height, "x", color=colour, ms=3, transform=above, clip_on=False)
    for axis, variant in zip(axes, variants, strict=True):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(numticks=6))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(VARIANT_NAMES.get(variant, variant), fontsize=9, pad=34)
        axis.set_xlabel("Step size")
    _logarithmic(axes, finite)
    axes[0].set_ylabel(f"Final training {leading['short']}")
    _legend(figure, axes)
    return figure


def step_rows(own: Sequence[Line]) -> Iterable[dict[str, Any]]:
    """One row for each run, with its final losses and errors."""
    for line in own:
        for run in sorted(line.records, key=lambda run: (run.lr, run.seed)):
            last = {
                name: "" if math.isnan(run.final(name)) else f"{run.final(name):.6g}"
                for name in ("train_nll", "valid_nll", "train_error", "valid_error")
            }
            yield {
                "variant": line.task.variant,
                "algorithm": line.algorithm,
                "lr": run.lr,
                "seed": run.seed,
                "status": "diverged" if run.diverged else "finished",
                "best": run.lr == line.best,
                "edge": line.edge if run.lr == line.best else "",
                **last,
            }


def pictures(shown: Sequence[Line]) -> Figure:
    """Inputs in the first row, then the reconstructions of each algorithm's network."""
    first = shown[0].chosen[0].pictures
    assert first is not None
    rows = [("Input", first.inputs)]
    for line in shown:
        if (found := line.chosen[0].pictures) is not None:
            rows.append((line.algorithm, found.outputs))
    count = len(first.inputs)
    figure = Figure(figsize=(0.9 + 0.62 * count, 0.66 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), count, squeeze=False)
    for axis_row, (name, images) in zip(axes, rows, strict=True):
        for axis, image in zip(axis_row, images, strict=True):
            axis.imshow(image, cmap="gray", vmin=0, vmax=255)
            axis.set_axis_off()
        axis_row[0].text(-0.15, 0.5, name, ha="right", va="center", transform=axis_row[0].transAxes)
    return figure


def picture_rows(shown: Sequence[Line]) -> Iterable[dict[str, Any]]:
    """One row for each reconstruction, with its mean squared error per pixel."""
    for line in shown:
        found = line.chosen[0].pictures
        for place, error in enumerate(found.errors() if found is not None else ()):
            yield {"algorithm": line.algorithm, "picture": place, "mse": f"{error:.6g}"}


def bars(table: dict[str, Any]) -> Figure:
    """Time per epoch as a ratio to SGD's, with the paper's ratios as marks."""
    rows = table["rows"]
    figure = Figure(figsize=(5, 0.6 + 0.3 * len(rows)), layout="constrained")
    axis = figure.subplots()
    places = range(len(rows))
    ratios = [row["ratio"] for row in rows]
    axis.barh(places, ratios, color=[_colour(row["algorithm"]) for row in rows], height=0.6)
    known = [(row["paper_ratio"], place) for place, row in enumerate(rows) if row["paper_ratio"]]
    if known:
        axis.plot(*zip(*known, strict=True), "|", color="black", ms=12, mew=1.5, label="paper")
        figure.legend(loc="outside upper right")
    axis.set_yticks(places, [row["algorithm"] for row in rows])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("Time an epoch, SGD = 1")
    return figure
