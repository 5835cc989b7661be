"""The data of a report: finished runs as plain records, grouped by task and into lines.

A *task* is what a network is asked to learn (an experiment and its variant); a *line* is one
algorithm on one task, drawn at its best step size over all its seeds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .algorithms import ALGORITHMS
from .sweep import edge_of
from .tasks import BY_NAME, SCALES

if TYPE_CHECKING:
    from . import runs as stored

DIAGONAL = ("DOP", "DMCNat", "DNat")
QUASI_DIAGONAL = ("QDOP", "QDMCNat", "QDNat")
VARIANTS = ("sigmoid", "tanh", "relu", "original", "inverted")
VARIANT_NAMES = {"relu": "ReLU", "original": "pixels as given", "inverted": "pixels inverted"}


class Task(NamedTuple):
    """What a network is asked to learn: an experiment and its variant."""

    experiment: str
    variant: str

    def __str__(self) -> str:
        return f"{self.experiment} {VARIANT_NAMES.get(self.variant, self.variant)}"


@dataclass(frozen=True)
class Pictures:
    """A few inputs of an autoencoder and their reconstructions by the trained network, as grey levels."""

    inputs: np.ndarray
    outputs: np.ndarray

    def errors(self) -> np.ndarray:
        """Mean squared error of each picture, on the scale where white is 1."""
        difference = (self.inputs.astype(float) - self.outputs.astype(float)) / 255
        return np.square(difference).reshape(len(difference), -1).mean(axis=1)


@dataclass(frozen=True)
class Record:
    """One finished run; `curve` holds equally long columns, epoch 0 being the untrained network."""

    task: Task
    algorithm: str
    lr: float
    seed: int
    curve: dict[str, list[float]]
    diverged: bool = False
    pictures: Pictures | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def epochs(self) -> int:
        """How many epochs were trained."""
        return int(max(self.curve["epoch"], default=0))

    def column(self, name: str) -> list[float]:
        """The values of one quantity; empty where the run has none."""
        return self.curve.get(name, [])

    def final(self, name: str = "train_nll") -> float:
        """The last value of one quantity; infinite for a diverged run, NaN where there is none."""
        values = self.column(name)
        if not values:
            return math.nan
        return math.inf if self.diverged or not math.isfinite(values[-1]) else values[-1]

    def lowest(self, name: str = "train_nll") -> float:
        """The lowest value that one quantity ever had; NaN where there is none."""
        return min((value for value in self.column(name) if math.isfinite(value)), default=math.nan)


@dataclass(frozen=True)
class Line:
    """One algorithm on one task: every run of it, and the step size that trained best."""

    task: Task
    algorithm: str
    records: tuple[Record, ...]

    @property
    def steps(self) -> list[float]:
        """The grid: every step size tried, in order."""
        return sorted({record.lr for record in self.records})

    def at(self, lr: float) -> list[Record]:
        """The runs at one step size, by seed."""
        return sorted((run for run in self.records if run.lr == lr), key=lambda run: run.seed)

    @property
    def grid_seed(self) -> int:
        """The seed on which the whole grid was run."""
        return min(record.seed for record in self.records)

    @property
    def select(self) -> str:
        """The loss by which step sizes are chosen: the training loss, but with dropout the validation loss."""
        known = BY_NAME.get(self.task.experiment)
        return known.select if known else "train_nll"

    @property
    def ranking(self) -> list[float]:
        """Step sizes by final loss on the grid's seed, best first, diverged left out.

        The grid is run on one seed only, so the further seeds of the best step size have no part
        in the choice.
        """
        grid = (record for record in self.records if record.seed == self.grid_seed)
        finals = {record.lr: record.final(self.select) for record in grid}
        return sorted((lr for lr in finals if math.isfinite(finals[lr])), key=lambda lr: finals[lr])

    @property
    def best(self) -> float | None:
        """The step size of lowest final loss; None if every one diverged."""
        return next(iter(self.ranking), None)

    @property
    def edge(self) -> str:
        """'low' or 'high' if the best step size is at that end of the grid, else an empty string."""
        return edge_of(self.steps, self.best) or ""

    @property
    def chosen(self) -> list[Record]:
        """The runs at the best step size; empty if every step size diverged."""
        return [] if self.best is None else self.at(self.best)

    @property
    def lost(self) -> int:
        """How many of the runs at the best step size diverged."""
        return sum(run.diverged for run in self.chosen)

    def finals(self, name: str = "train_nll") -> list[float]:
        """The last value of one quantity at the best step size, one for each seed."""
        return [run.final(name) for run in self.chosen if not math.isnan(run.final(name))]


def rank(name: str, order: Sequence[str]) -> tuple[int, str]:
    """Sorting key: the position of ``name`` in ``order``; names that are not in it come last, alphabetically."""
    return (order.index(name) if name in order else len(order), name)


def lines(records: Iterable[Record]) -> list[Line]:
    """Group runs into lines, sorted by experiment name; variants and algorithms are in the paper's order."""
    groups: dict[tuple[Task, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.task, record.algorithm), []).append(record)
    ordered = sorted(
        groups,
        key=lambda key: (
            key[0].experiment,
            rank(key[0].variant, VARIANTS),
            rank(key[1], ALGORITHMS),
        ),
    )
    return [Line(task, algorithm, tuple(groups[task, algorithm])) for task, algorithm in ordered]


def mean_curve(records: Sequence[Record], name: str) -> np.ndarray:
    """Three rows: the mean, lowest and highest of quantity ``name`` over the runs, cut to the length of the shortest run."""
    columns = [record.column(name) for record in records if record.column(name)]
    length = min((len(column) for column in columns), default=0)
    if not length:
        return np.empty((3, 0))
    stacked = np.array([column[:length] for column in columns], dtype=float)
    return np.stack([stacked.mean(0), stacked.min(0), stacked.max(0)])


def _settings(run: stored.Run) -> str:
    """The config without step size and seed, as a string to compare: the same for all runs of a line."""
    return json.dumps(
        {k: v for k, v in run.config.items() if k not in ("lr", "seed")}, sort_keys=True
    )


def records(collection: stored.Collection) -> list[Record]:
    """The finished runs of a collection, with one choice of settings for each algorithm on each task.

    A folder may hold an algorithm on a task with several settings (two scales, a momentum tried by
    hand). Preferred are the settings of the experiment's sweep, then the largest scale, then the
    settings with the most runs.
    """
    swept = {
        entry["id"]
        for sweep in collection.sweeps.values()
        for cell in sweep["cells"]
        for entry in cell["lrs"]
    }
    groups: dict[tuple[str, str, str], list[stored.Run]] = {}
    for run in collection.runs:
        if run.result:
            key = (run.config["experiment"], run.config["variant"], run.config["algorithm"])
            groups.setdefault(key, []).append(run)
    kept = []
    for group in groups.values():
        count = Counter(_settings(run) for run in group)
        leader = max(
            group,
            key=lambda run: (
                run.id in swept,
                rank(run.config["scale"], SCALES),
                count[_settings(run)],
            ),
        )
        kept += [_record(run) for run in group if _settings(run) == _settings(leader)]
    return kept


def _record(run: stored.Run) -> Record:
    names = sorted({name for line in run.metrics for name in line})
    curve = {
        name: [math.nan if line.get(name) is None else float(line[name]) for line in run.metrics]
        for name in names
    }
    images = run.pictures
    return Record(
        task=Task(run.config["experiment"], run.config["variant"]),
        algorithm=run.config["algorithm"],
        lr=float(run.config["lr"]),
        seed=int(run.config["seed"]),
        curve={"epoch": [], "seconds": [], **curve},
        diverged=run.result["status"] == "diverged",
        pictures=Pictures(images["original"], images["reconstruction"]) if images else None,
        config=run.config,
        environment=run.environment,
    )
