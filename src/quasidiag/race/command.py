"""``quasidiag race``: the optimizer without a learning rate beside tuned peers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from quasidiag.experiments import datasets, pool, rounds
from quasidiag.experiments.commands import options
from quasidiag.experiments.config import UsageError, suggest
from quasidiag.experiments.runs import Line, read_json, write_json

from . import tasks
from .contenders import CONTENDERS, OURS, installed
from .plan import Plan, ordered


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "race",
        help="race the untuned optimizer against tuned peers",
        description="Peers are tuned over powers of ten and a cosine schedule; ours runs as it is. Killed or stopped "
        "by a time limit, the same command goes on.",
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(tasks.BY_NAME))
    parser.add_argument("--contenders", metavar="A,B", help="only these (default: all installed)")
    options.add_scale(parser, tasks.SCALES)
    parser.add_argument(
        "--robustness", action="store_true", help="other factors, batch sizes and shares"
    )
    parser.add_argument(
        "--no-extend", action="store_true", help="only the grid that peers begin with"
    )
    options.add_jobs(parser)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="then stop, resumably")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print the runs that would be done")
    instead.add_argument(
        "--time",
        action="store_true",
        help="only time the contenders' steps, from the first on, in turns, alone",
    )
    instead.add_argument("--summary", action="store_true", help="only sum up the runs there are")
    parser.add_argument(
        "--from",
        dest="results",
        metavar="DIR",
        help="go on from the runs (runs.json.gz) and times (timing.json) in this folder, such as results/race",
    )
    parser.add_argument("--out", metavar="DIR", help="tables, numbers and pictures (RUNS/race)")
    options.add_device(parser)
    options.add_runs(parser)
    options.add_data_dir(parser)
    parser.set_defaults(run=run, settings=[])


def run(arguments: argparse.Namespace) -> int:
    """Do the pending runs, round after round, until none are left; then write the tables."""
    deadline = None if arguments.time_limit is None else time.time() + arguments.time_limit
    names = [word for word in arguments.tasks if "=" not in word] or list(tasks.BY_NAME)
    words = [*(word for word in arguments.tasks if "=" in word), *arguments.settings]
    chosen = [tasks.find(name) for name in names]
    # A summary only reads runs, so it also includes contenders whose packages are not installed.
    contenders = _contenders(
        arguments.contenders, [*CONTENDERS] if arguments.summary else installed()
    )
    only_reads = arguments.dry_run or (arguments.summary and arguments.results is None)
    root = options.runs_dir(arguments, write=not only_reads)
    known = {}
    if arguments.results is not None:
        known = _restore(Path(arguments.results), Path(root), arguments.dry_run)
    if arguments.summary:  # a summary needs neither the data nor the device
        device, data_dir = arguments.device, None
    else:
        device, data_dir = options.device(arguments), options.data_dir(arguments)
    found = {task.dataset: task.dataset for task in chosen}
    if "mnist" in found:
        found["mnist"] = _digits(arguments, Path(root), data_dir)
    plans = [
        Plan(
            task,
            arguments.scale,
            root,
            found[task.dataset],
            device,
            tuple(words),
            contenders,
            known,
            robustness=arguments.robustness,
            extend=not arguments.no_extend,
            data_dir=data_dir,
        )
        for task in chosen
    ]
    if arguments.dry_run:
        rounds.announce(ordered(plans))
        return 0
    code = 0
    if arguments.time:
        _time(plans, Path(root), deadline)
    elif not arguments.summary:
        code = _run_all(plans, pool.Settings(root, data_dir, deadline), arguments.jobs)
    results = _summaries(plans, Path(root))
    if arguments.summary and not results:
        raise UsageError(
            f"there are no runs in {root} to sum up at --scale {arguments.scale} --device {device}"
        )
    _write(results, Path(arguments.out or Path(root) / "race"))
    return code


def _restore(results: Path, root: Path, dry_run: bool) -> dict[str, Line]:
    """Copy the runs and times of an earlier race from ``results`` into ``root``, unless this is a dry run.

    Those already there are kept. Returns the results of the runs, by id.
    """
    from quasidiag.experiments.export import restore

    known = restore(results / "runs.json.gz", root, tasks.RaceConfig, dry_run)
    times = read_json(results / "timing.json")
    if not dry_run and times is not None and read_json(root / "race-timing.json") is None:
        write_json(root / "race-timing.json", times)
    return known


def _contenders(text: str | None, there: Collection[str]) -> tuple[str, ...]:
    chosen = tuple(filter(None, (text or "").split(",")))
    for name in chosen:
        if name not in CONTENDERS:
            raise suggest("contender", name, CONTENDERS)
    return tuple(name for name in there if not chosen or name in chosen)


def _digits(arguments: argparse.Namespace, root: Path, data_dir: str | None) -> str:
    """The dataset of digits: MNIST or what stands in for it; a summary takes the one that was used."""
    if arguments.summary:
        return _raced(root)
    if arguments.dry_run:
        here = data_dir is not None or datasets.cached("mnist")
        name = "mnist" if here else _raced(root)
        sentence = datasets.planned(name, data_dir)
    else:
        name, sentence = datasets.digits(data_dir)
    print(f"data: {sentence}", flush=True)
    return name


def _raced(root: Path) -> str:
    """The dataset of digits that the runs in ``root`` have used: ``mnist-5k`` if MNIST was not available to them."""
    configs = map(read_json, root.glob("runs/*/config.json"))
    known = {c["dataset"] for c in configs if c["experiment"] in tasks.BY_NAME}
    return "mnist-5k" if "mnist-5k" in known and "mnist" not in known else "mnist"


def _run_all(plans: Sequence[Plan], settings: pool.Settings, jobs: int) -> int:
    from .train import work

    return rounds.until_done(
        lambda: ordered(plans),
        lambda configs: pool.run_all(configs, settings, jobs, work=work),
        lambda name: tasks.find(name).select,
    )


def _time(plans: Sequence[Plan], root: Path, deadline: float | None) -> None:
    """Time every task, and write it to ``race-timing.json`` by device and task; tasks share the time limit evenly."""
    from .timing import measure

    torch.set_flush_denormal(True)
    path = root / "race-timing.json"
    for k, plan in enumerate(plans):
        share = None if deadline is None else (deadline - time.time()) / (len(plans) - k)
        measured = measure(plan, seconds=share)
        timing = read_json(path) or {}
        timing.setdefault(plan.device, {})[plan.experiment.name] = {
            **measured,
            "threads": torch.get_num_threads(),
        }
        write_json(path, timing)
        paces = {name: pace["then"] for name, pace in measured.items() if name != "device"}
        base = paces.get("AdamW", next(iter(paces.values())))
        print(
            f"{plan.experiment.name}: "
            + ", ".join(
                f"{name} {1000 * value:.2f} ms ({value / base:.2f})"
                for name, value in paces.items()
            ),
            flush=True,
        )


def _summaries(plans: Sequence[Plan], root: Path) -> list[dict[str, Any]]:
    """The results of each task that has any."""
    from .summary import summarise

    timing = read_json(root / "race-timing.json") or {}
    chosen = timing.get("cpu") or timing.get("cuda")
    return [s for s in (summarise(plan, chosen) for plan in plans) if s["contenders"]]


def _write(found: Sequence[dict[str, Any]], out: Path) -> None:
    """Write and print the tables, and draw the pictures."""
    from . import summary

    summary.write(found, out)
    print((out / "tables.md").read_text())
    try:
        from . import pictures
    except ModuleNotFoundError:
        print("no pictures: matplotlib is not installed", file=sys.stderr)
    else:
        pictures.write(found, out)
    ours = sum(any(row["contender"] == OURS for row in s["contenders"]) for s in found)
    print(f"{out}: {len(found)} tasks, {ours} of them with {OURS}")
