"""The curves of the race, by step and by time, in the report's style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quasidiag.experiments.figures import STYLE, _logarithmic

from .contenders import OURS
from .timing import elapsed

#: Colour and line style: no two of similar colour have the same style.
STYLES: dict[str, tuple[str, Any]] = {
    OURS: ("#c02c00", "-"),
    "AdamW": ("#1f4fa3", "-"),
    "Muon": ("#1d8a3c", "-"),
    "SGD": ("#7f7f7a", "-"),
    "SOAP": ("#8a3fa8", "-"),
    "PSGD-Kron": ("#1aa7c4", (0, (5, 1.5))),
    "Shampoo": ("#d99a00", (0, (5, 1.5))),
    "SINGD": ("#d6337c", (0, (3, 1.2, 1, 1.2))),
    "K-FAC": ("#5e3c1a", (0, (1.2, 1.2))),
}
LOSS = {"train_nll": "Training NLL (nats)", "train_error": "Training half squared error"}


def write(summaries: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """One picture for each task."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(STYLE):
        for summary in (s for s in summaries if s["contenders"]):
            path = out / f"{summary['task']}.png"
            draw(summary).savefig(path, dpi=130, metadata={"Software": None})
            written.append(path)
    return written


def draw(summary: dict[str, Any]) -> Figure:
    """Loss by step, and by time where that was measured."""
    timed = bool(summary["timing"])
    figure = Figure(figsize=(9.2 if timed else 6.2, 4.4), layout="constrained")
    axes = figure.subplots(1, 2 if timed else 1, squeeze=False, sharey=True)[0]
    length = summary["steps_per_epoch"]
    steps = {
        row["contender"]: [length * epoch for epoch in row["curve"]["epoch"]]
        for row in summary["contenders"]
    }
    _curves(axes[0], summary, steps)
    axes[0].set_xlabel(f"Step ({length} an epoch, minibatches of {summary['batch_size']})")
    axes[0].set_ylabel(LOSS[summary["loss"]])
    if timed:
        seconds = {
            name: [elapsed(summary["timing"][name], step) for step in at]
            for name, at in steps.items()
            if name in summary["timing"]
        }
        _curves(axes[1], summary, seconds)
        device = {"cpu": "on a CPU", "cuda": "on a GPU"}.get(summary["timing"].get("device"), "")
        axes[1].set_xlabel(f"Seconds of training {device}".rstrip())
    drawn = [value for row in summary["contenders"] for value in row["curve"]["loss"][1:]]
    if min(drawn) == 0:  # a loss of exactly 0 has no place on a logarithmic axis
        drawn = [value for value in drawn if value > 0]
    for axis in axes:
        axis.set_xscale("log")
    _logarithmic(axes, drawn)
    top, bottom = max(drawn), min(drawn)
    margin = 0.05 * (top - bottom)
    axes[0].set_ylim(
        *((bottom / 1.1, top * 1.1) if bottom > 0 else (bottom - margin, top + margin))
    )
    figure.suptitle(summary["title"], fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if timed else 2)
    return figure


def _curves(axis: Axes, summary: dict[str, Any], places: dict[str, list[float]]) -> None:
    """Draw each contender's loss from the first step on; ``places`` has its horizontal positions, by contender."""
    for row in summary["contenders"]:
        name = row["contender"]
        if name not in places:
            continue
        x = places[name][1:]
        colour, style = STYLES[name]
        label = f"{name}, untuned" if name == OURS else f"{name} ({row['lr']:g}, {row['schedule']})"
        axis.plot(
            x,
            row["curve"]["loss"][1:],
            color=colour,
            ls=style,
            lw=2.8 if name == OURS else 1.4,
            label=label,
            zorder=3 if name == OURS else 2,
        )
        if row["seeds"] > 1:
            band = (row["curve"]["low"][1:], row["curve"]["high"][1:])
            axis.fill_between(x, *band, color=colour, alpha=0.15, lw=0)
