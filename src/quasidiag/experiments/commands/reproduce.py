"""``quasidiag reproduce``: an experiment of the paper, or all of them."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import datasets, pool, rounds, tasks, timing
from ..algorithms import ALGORITHMS
from ..config import suggest
from ..export import restore
from ..progress import table
from ..sweep import Sweep, interleaved
from . import options


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "reproduce",
        help="redo figures and tables of the paper",
        description="Every algorithm at its best step size, which is searched for, and the report. Killed or stopped "
        "by a time limit, the same command goes on.",
    )
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="experiments, or all; and key=value"
    )
    options.add_scale(parser, tasks.SCALES)
    options.add_jobs(parser)
    parser.add_argument("--algorithms", metavar="A,B", help="only these algorithms")
    parser.add_argument("--dask", metavar="ADDRESS", help="run on this Dask cluster")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="then stop, resumably")
    parser.add_argument("--from", dest="export", metavar="EXPORT", help="go on from these results")
    parser.add_argument("--dry-run", action="store_true", help="print the runs that would be done")
    parser.add_argument(
        "--tensorboard", action="store_true", help="log to RUNS/tensorboard as well"
    )
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="a run saves itself this often, to go on from there (10)",
    )
    options.add_device(parser)
    options.add_runs(parser)
    options.add_data_dir(parser)
    parser.set_defaults(run=run, settings=[])


def run(arguments: argparse.Namespace) -> int:
    """Do the pending runs, round after round, until none are left; then print the best step sizes."""
    deadline = None if arguments.time_limit is None else time.time() + arguments.time_limit
    settings = (*(word for word in arguments.names if "=" in word), *arguments.settings)
    names = [word for word in arguments.names if "=" not in word]
    names = list(tasks.NAMES) if "all" in names else list(dict.fromkeys(names))
    root = options.runs_dir(arguments, write=not arguments.dry_run)
    device, data_dir = options.device(arguments), options.data_dir(arguments)
    known = {}
    if arguments.export is not None:
        known = restore(Path(arguments.export), root, dry_run=arguments.dry_run)
    sweeps = [
        replace(sweep, elsewhere=known)
        for sweep in _sweeps(arguments, names, settings, root, device, data_dir)
    ]
    if arguments.dry_run:
        if tasks.TIMING in names:
            print("timing: eight algorithms, interleaved")
        rounds.announce(interleaved(sweeps))
        return 0
    shared = pool.Settings(
        root,
        data_dir,
        deadline,
        arguments.checkpoint_seconds,
        arguments.tensorboard,
        not arguments.no_graph,
    )
    if tasks.TIMING in names:  # first and alone: nothing else may share the machine with it
        timing.measure_and_write(root, device, arguments.scale, data_dir)
    code = rounds.until_done(
        lambda: interleaved(sweeps),
        lambda configs: pool.run_all(configs, shared, arguments.jobs, arguments.dask),
        lambda name: tasks.find(name).select,
        lambda: [sweep.write_summary() for sweep in sweeps],
    )
    any_finished = [_show(sweep) for sweep in sweeps]
    return code or (0 if all(any_finished) else 1)


def _sweeps(
    arguments: argparse.Namespace,
    names: list[str],
    settings: tuple[str, ...],
    root: str,
    device: str,
    data_dir: str | None,
) -> list[Sweep]:
    """A sweep for each experiment asked for; loads the data first, to report a missing file before anything runs."""
    chosen = tuple(filter(None, (arguments.algorithms or "").split(",")))
    for name in chosen:
        if name not in ALGORITHMS:
            raise suggest("algorithm", name, ALGORITHMS)
    experiments = [tasks.find(name) for name in names if name != tasks.TIMING]
    found: dict[str, str] = {}
    for dataset in dict.fromkeys(experiment.dataset for experiment in experiments):
        if arguments.dry_run:
            found[dataset], sentence = dataset, datasets.planned(dataset, data_dir)
        elif dataset == "mnist":
            found[dataset], sentence = datasets.digits(data_dir)
        else:
            found[dataset], sentence = dataset, datasets.load(dataset, data_dir).source
        print(f"data: {sentence}", flush=True)
    return [
        Sweep(e, arguments.scale, root, found[e.dataset], device, settings, chosen)
        for e in experiments
    ]


def _show(sweep: Sweep) -> bool:
    """Print the best step sizes; return whether any algorithm has one, that is, did not diverge everywhere."""
    summary = sweep.write_summary()
    rows = []
    for cell in summary["cells"]:
        shown = [_number(cell["final"].get(key)) for key in KEYS]
        best = "none" if cell["best_lr"] is None else f"{cell['best_lr']:g}"
        edge = "" if cell["edge"] is None else f" ({cell['edge']} end)"
        rows.append((f"{cell['variant']} {cell['algorithm']}", best + edge, *shown))
    done = "" if summary["complete"] else ", incomplete"
    title = f"{summary['experiment']} ({summary['paper']}), {summary['scale']} scale on {summary['dataset']}{done}"
    table(("algorithm", "best step size", *(key.replace("_", " ") for key in KEYS)), rows, title)
    return any(cell["best_lr"] is not None for cell in summary["cells"])


KEYS = ("train_nll", "train_error", "valid_nll", "valid_error")


def _number(statistics: dict[str, Any] | None) -> str:
    if statistics is None or statistics["mean"] is None:
        return "-"
    return f"{statistics['mean']:.4g}"
