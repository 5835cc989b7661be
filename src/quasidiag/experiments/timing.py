"""Table 1: the time of an epoch for each algorithm, as a ratio to SGD.

All algorithms take turns in one process, a few steps each, round after round, so that other load on
the machine affects all of them alike. Ratios are taken within each round, then their median.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from . import datasets, tasks
from .algorithms import ALGORITHMS, known_gamma
from .commands import options
from .config import Config
from .execute import environment
from .progress import progress, table
from .runs import read_json, write_json
from .train import Trainer

TITLE = "Time of an epoch, as a ratio to SGD"
LAYERS = (784, 800, 800, 10)
BATCH = 500
STEPS_PER_EPOCH = 100
#: Seconds per epoch in the paper's Table 1.
PAPER = dict(zip(ALGORITHMS, (29.10, 33.39, 42.44, 56.68, 58.17, 68.01, 120.16, 129.76)))


@dataclass(frozen=True)
class Length:
    """How much is measured: the number of rounds, and of each algorithm's steps per round."""

    rounds: int
    steps: int
    batch_size: int = BATCH


LENGTHS = {"smoke": Length(3, 1, 50), "small": Length(12, 4), "paper": Length(30, 20)}


def measure(device: str, scale: str, dataset: str, data_dir: str | None) -> dict[str, Any]:
    """Time all algorithms in turns; return the rows of the table and how they were measured."""
    length = LENGTHS[scale]
    trainers = {name: _trainer(name, device, dataset, length, data_dir) for name in ALGORITHMS}
    seconds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    with progress("timing", length.rounds, every=5.0) as advance:
        for number in range(-1, length.rounds):  # the first round only warms up
            for name, trainer in trainers.items():
                taken = _steps(trainer, max(length.steps, 5 if number < 0 else 0))
                if number >= 0:
                    seconds[name].append(taken / length.steps)
            if number >= 0:
                advance(f"round of {length.steps} steps")
    data = next(iter(trainers.values())).data
    about = environment(device, data.source)
    return {
        "layers": list(LAYERS),
        "batch_size": length.batch_size,
        "activation": "sigmoid",
        "device": device,
        **{key: about[key] for key in ("device_name", "threads", "torch", "platform", "data")},
        "graph": device != "cpu",
        "scale": scale,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "rounds": length.rounds,
        "steps_per_round": length.steps,
        "rows": [_row(name, seconds) for name in ALGORITHMS],
    }


def _trainer(name: str, device: str, dataset: str, length: Length, data_dir: str | None) -> Trainer:
    config = Config(
        experiment=tasks.TIMING,
        variant="sigmoid",
        algorithm=name,
        lr=1e-5,  # small enough for all of them: what is timed must not diverge
        dataset=dataset,
        layers=LAYERS,
        epochs=1,
        batch_size=length.batch_size,
        train_size=4000,
        gamma=known_gamma(name),
        device=device,
    )
    return Trainer(config, data_dir)


def _steps(trainer: Trainer, count: int) -> float:
    x, t = trainer.data.train
    size = trainer.config.batch_size
    trainer.model.train()
    trainer._wait()
    start = time.perf_counter()
    for k in range(count):
        first = k * size % len(x)
        trainer.step(x[first : first + size], t[first : first + size])
    trainer._wait()
    return time.perf_counter() - start


def _row(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [mine / sgd for mine, sgd in zip(seconds[name], seconds["SGD"])]
    tenths = quantiles(ratios, n=10, method="inclusive")
    return {
        "algorithm": name,
        "seconds_per_epoch": median(seconds[name]) * STEPS_PER_EPOCH,
        "ratio": median(ratios),
        "ratio_low": tenths[0],
        "ratio_high": tenths[-1],
        "paper_seconds": PAPER[name],
        "paper_ratio": PAPER[name] / PAPER["SGD"],
    }


def measure_and_write(root: str, device: str, scale: str, data_dir: str | None) -> dict[str, Any]:
    """Measure, write the result to ``timing.json`` in ``root`` under the device's name, and print and return it."""
    torch.set_flush_denormal(True)
    dataset, sentence = datasets.digits(data_dir)
    print(f"data: {sentence}", flush=True)
    measured = measure(device, scale, dataset, data_dir)
    path = Path(root) / "timing.json"
    write_json(path, {**(read_json(path) or {}), device: measured})
    rows = [
        (
            row["algorithm"],
            f"{row['seconds_per_epoch']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
            f"{row['paper_ratio']:.2f}",
        )
        for row in measured["rows"]
    ]
    headers = ("algorithm", "seconds an epoch", "ratio to SGD", "10-90 %", "paper's ratio")
    table(
        headers,
        rows,
        f"timing (Table 1) on {measured['device_name']}, batch {measured['batch_size']}",
    )
    return measured


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "timing",
        help="time all algorithms against SGD (Table 1)",
        description="Seconds an epoch of each algorithm on the paper's classifier, beside SGD's.",
    )
    options.add_scale(parser, tasks.SCALES)
    options.add_device(parser)
    options.add_runs(parser)
    options.add_data_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write and print."""
    root, device = options.runs_dir(arguments), options.device(arguments)
    measure_and_write(root, device, arguments.scale, options.data_dir(arguments))
    return 0
