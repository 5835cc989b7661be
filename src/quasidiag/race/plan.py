"""Works out from the results on disk which runs the race still needs (see :mod:`quasidiag.experiments.sweep`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quasidiag.experiments.config import Config
from quasidiag.experiments.runs import Line, RunDir
from quasidiag.experiments.sweep import Sweep, best_of

from .contenders import CONTENDERS, OURS
from .tasks import FACTORS, ROBUSTNESS, SCHEDULES


@dataclass(frozen=True)
class Plan(Sweep):
    """The runs of one task: every peer at several step sizes and schedules, ours untuned.

    With ``robustness`` ours also runs at other factors, with other minibatch sizes, and with its metric on a share of
    each minibatch. Without ``extend`` peers stay on the grid that their search begins with.
    """

    robustness: bool = False
    extend: bool = True
    data_dir: str | None = None

    def cells(self) -> Iterator[tuple[str, str]]:
        """Every schedule with every contender; ours comes first, because its runs take longest."""
        for algorithm in (a for a in CONTENDERS if a in self.algorithms):
            schedules = ("constant",) if algorithm == OURS else SCHEDULES
            yield from ((schedule, algorithm) for schedule in schedules)
        if self.robustness and OURS in self.algorithms:
            yield from ((variant, OURS) for variant in ROBUSTNESS)

    def lrs(self, variant: str, algorithm: str) -> list[float]:
        """The step sizes to try. Ours is not tuned: its factor is 1, except in the robustness runs that vary it."""
        if algorithm == OURS:
            return list(FACTORS) if variant == "factor" else [1.0]
        if not self.extend:
            return self.experiment.grid(algorithm, self.scale)
        return super().lrs(variant, algorithm)

    def pending(self) -> list[Config]:
        """The runs that can be done now; seeds beyond the first only for the schedule and step size of :meth:`chosen`."""
        chosen = {a: self.chosen(a) for a in self.algorithms}
        wanted = super().pending()
        return [c for c in wanted if c.seed == 0 or (c.variant, c.lr) == chosen[c.algorithm]]

    def metrics(self, config: Config) -> list[Line]:
        """The lines of metrics of a run."""
        return RunDir(self.root, config).metrics()

    def best(self, algorithm: str) -> tuple[str, float] | None:
        """The schedule and step size with the lowest final loss on the first seed; None if no run has finished."""
        found = {
            (schedule, lr): value
            for schedule in SCHEDULES
            for lr, value in self.values(schedule, algorithm, self.lrs(schedule, algorithm)).items()
            if math.isfinite(value)
        }
        return min(found, key=lambda key: found[key]) if found else None

    def tuned(self, algorithm: str) -> bool:
        """Whether a peer's search has ended; to show its best before that would be unfair."""
        lrs = {schedule: self.lrs(schedule, algorithm) for schedule in SCHEDULES}
        return all(len(self.values(s, algorithm, lrs[s])) == len(lrs[s]) for s in SCHEDULES)

    def chosen(self, algorithm: str) -> tuple[str, float] | None:
        """The schedule and step size at which a contender is shown: a peer's best, ours untuned; None if there is none."""
        if algorithm != OURS:
            return self.best(algorithm) if self.tuned(algorithm) else None
        ended_well = best_of(self.values("constant", OURS, [1.0])) is not None
        return ("constant", 1.0) if ended_well else None

    def curves(self, schedule: str, algorithm: str, lr: float) -> list[list[Line]]:
        """The metrics of every seed that finished without diverging."""
        seeds = self.experiment.scale(self.scale).seeds
        configs = [self.config(schedule, algorithm, lr, seed) for seed in seeds]
        done = [(config, self.result(config)) for config in configs]
        return [self.metrics(c) for c, result in done if result and result["status"] == "finished"]

    def tried(self, algorithm: str) -> list[dict[str, Any]]:
        """Every run of a contender's search, with its status and final loss."""
        return [
            {"schedule": schedule, **self._tried(schedule, algorithm, lr)}
            for schedule in SCHEDULES
            for lr in self.lrs(schedule, algorithm)
        ]


def ordered(plans: Sequence[Plan]) -> list[Config]:
    """All pending runs, by contender (ours first), then seed, then task; robustness runs come last."""
    rank = {name: k for k, name in enumerate(CONTENDERS)}
    pending = [
        (config.variant in ROBUSTNESS, rank[config.algorithm], config.seed, k, config)
        for k, plan in enumerate(plans)
        for config in plan.pending()
    ]
    return [entry[-1] for entry in sorted(pending, key=lambda entry: entry[:-1])]
