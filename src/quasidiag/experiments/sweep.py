"""The search for step sizes: from the results on disk it works out which runs are still needed.

It keeps no other state, so a sweep that was killed is continued by starting it again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .config import Config
from .runs import Line, RunDir, write_json
from .tasks import Experiment, power


@dataclass(frozen=True)
class Sweep:
    """One experiment at one scale: which runs it needs; they are kept under ``root``.

    ``elsewhere`` has further results, by the ids of their configs: those that a dry run does not import.
    """

    experiment: Experiment
    scale: str
    root: str | os.PathLike[str]
    dataset: str
    device: str = "cpu"
    overrides: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    elsewhere: Mapping[str, Line] = field(default_factory=dict)

    def config(self, variant: str, algorithm: str, lr: float, seed: int = 0) -> Config:
        """The run of one algorithm at one step size."""
        config = self.experiment.config(
            variant,
            algorithm,
            lr,
            seed=seed,
            scale=self.scale,
            dataset=self.dataset,
            device=self.device,
        )
        return config.override(self.overrides)

    def result(self, config: Config) -> Line | None:
        """The result of a run; None until it has ended."""
        return RunDir(self.root, config).result or self.elsewhere.get(config.id)

    def cells(self) -> Iterator[tuple[str, str]]:
        """Every variant with every chosen algorithm."""
        chosen = self.algorithms or self.experiment.algorithms
        for variant in self.experiment.variants:
            yield from ((variant, a) for a in self.experiment.algorithms if a in chosen)

    def values(self, variant: str, algorithm: str, lrs: Sequence[float]) -> dict[float, float]:
        """The final value of ``select`` for each step size that was tried (seed 0); infinity where the run diverged."""
        found = {}
        for lr in lrs:
            result = self.result(self.config(variant, algorithm, lr))
            if result is not None:
                value = result["final"].get(self.experiment.select)
                good = result["status"] == "finished" and value is not None
                found[lr] = value if good else math.inf
        return found

    def lrs(self, variant: str, algorithm: str) -> list[float]:
        """The step sizes to try, as far as results tell: the grid, extended while its best step size is at an end."""
        lrs = self._grown(variant, algorithm)
        if self.experiment.common_grid:
            lrs = sorted({lr for v in self.experiment.variants for lr in self._grown(v, algorithm)})
        return lrs

    def _grown(self, variant: str, algorithm: str) -> list[float]:
        lrs = self.experiment.grid(algorithm, self.scale)
        below = above = self.experiment.scale(self.scale).extend
        while True:
            values = self.values(variant, algorithm, lrs)
            if len(values) < len(lrs):
                return lrs
            best = best_of(values)
            if (best is None or best == lrs[0]) and below:
                below -= 1
                lrs = [power(round(math.log10(lrs[0])) - 1), *lrs]
            elif best == lrs[-1] and above:
                above -= 1
                lrs = [*lrs, power(round(math.log10(lrs[-1])) + 1)]
            else:
                return lrs

    def pending(self) -> list[Config]:
        """The runs that can be done now; those that depend on their results come in the next round."""
        configs: list[Config] = []
        for variant, algorithm in self.cells():
            lrs = self.lrs(variant, algorithm)
            values = self.values(variant, algorithm, lrs)
            configs += [self.config(variant, algorithm, lr) for lr in lrs if lr not in values]
            best = best_of(values)
            if len(values) == len(lrs) and best is not None:
                for seed in self.experiment.scale(self.scale).seeds:
                    config = self.config(variant, algorithm, best, seed)
                    if self.result(config) is None:
                        configs.append(config)
        return configs

    def summary(self) -> dict[str, Any]:
        """The best step sizes and the losses they reach, ready for JSON."""
        size = self.experiment.scale(self.scale)
        return {
            "experiment": self.experiment.name,
            "paper": self.experiment.paper,
            "title": self.experiment.title,
            "scale": self.scale,
            "device": self.device,
            "select": self.experiment.select,
            "epochs": self.config(*next(self.cells()), 1.0).epochs,
            "dataset": self.dataset,
            "overrides": list(self.overrides),
            "seeds": list(size.seeds),
            "complete": not self.pending(),
            "cells": [self._cell(variant, algorithm) for variant, algorithm in self.cells()],
        }

    def _cell(self, variant: str, algorithm: str) -> dict[str, Any]:
        lrs = self.lrs(variant, algorithm)
        values = self.values(variant, algorithm, lrs)
        best = best_of(values)
        others = {lr: value for lr, value in values.items() if lr != best}
        runs = [] if best is None else list(self._seeds(variant, algorithm, best))
        finals = [result["final"] for _, result in runs]
        return {
            "variant": variant,
            "algorithm": algorithm,
            "lrs": [self._tried(variant, algorithm, lr) for lr in lrs],
            "best_lr": best,
            "second_lr": best_of(others),
            "edge": edge_of(lrs, best),
            "runs": [config.id for config, _ in runs],
            "final": {key: _statistics([line[key] for line in finals]) for key in _keys(finals)},
        }

    def _tried(self, variant: str, algorithm: str, lr: float) -> dict[str, Any]:
        config = self.config(variant, algorithm, lr)
        result = self.result(config)
        status = "missing" if result is None else result["status"]
        value = None if result is None else result["final"].get(self.experiment.select)
        return {"lr": lr, "id": config.id, "status": status, "value": value}

    def _seeds(self, variant: str, algorithm: str, lr: float) -> Iterator[tuple[Config, Line]]:
        for seed in self.experiment.scale(self.scale).seeds:
            config = self.config(variant, algorithm, lr, seed)
            result = self.result(config)
            if result is not None:
                yield config, result

    def write_summary(self) -> dict[str, Any]:
        """Write the summary into ``sweeps``, beside the runs, and return it."""
        summary = self.summary()
        folder = Path(self.root) / "sweeps"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{self.experiment.name}.json", summary)
        return summary


def best_of(values: dict[float, float]) -> float | None:
    """The step size with the lowest value; None if all diverged or there are none."""
    finite = {lr: value for lr, value in values.items() if math.isfinite(value)}
    return min(finite, key=lambda lr: finite[lr]) if finite else None


def edge_of(lrs: Sequence[float], best: float | None) -> str | None:
    """'low' or 'high' if the best step size is at that end of ``lrs``, so that a better one may lie beyond; else None."""
    if best is None or len(lrs) < 2:
        return None
    return "low" if best == lrs[0] else "high" if best == lrs[-1] else None


def interleaved(sweeps: Sequence[Sweep]) -> list[Config]:
    """The pending runs of all sweeps, in turns, so that each gets its share of a limited time."""
    turns = zip_longest(*(sweep.pending() for sweep in sweeps))
    return [config for turn in turns for config in turn if config is not None]


def _keys(lines: list[Line]) -> list[str]:
    return [key for key in lines[0] if key not in ("epoch", "seconds")] if lines else []


def _statistics(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "std": None, "values": values}
    spread = stdev(known) if len(known) > 1 else 0.0  # of the seeds, as in the report
    return {"mean": fmean(known), "std": spread, "values": values}
