"""The time of the first steps of every contender and of later ones, in turns, so that whatever else the machine does
falls on all of them.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import median
from typing import Any, TypedDict

from torch import Tensor

from quasidiag.experiments.progress import progress

from .contenders import CONTENDERS, OURS
from .plan import Plan
from .train import RaceTrainer

#: Steps before the first measurement: what a process does once was done, and what is done every tenth step too.
WARM_UP = 11
#: The first steps of a run cost more than later ones, some of them more than others: each is timed.
FIRST = 20
#: Later steps, of ours and of a peer: a multiple of what they do only now and then. Ours measures every sixth and
#: every eighth step; SOAP, SINGD and K-FAC do so every tenth.
OWN, PEERS = 24, 20


class Pace(TypedDict):
    """Seconds from the start of a run to the end of each of its first steps, and of a step after these."""

    first: list[float]
    then: float


def elapsed(pace: Pace, steps: float) -> float:
    """Seconds from the start of a run to a step, or to a part of one."""
    first = pace["first"]
    whole = min(int(steps), len(first))
    before = first[whole - 1] if whole else 0.0
    following = first[whole] - before if whole < len(first) else pace["then"]
    return before + (steps - whole) * following


def measure(plan: Plan, rounds: int = 7, seconds: float | None = None) -> dict[str, Any]:
    """The pace of every contender on one task, the median of runs that each begin anew.

    ``seconds`` are shared out evenly: whoever has used up its share, after one round at the least, is done.
    """
    names = [name for name in CONTENDERS if name in plan.algorithms]
    share = math.inf if seconds is None else seconds / len(names)
    spent = {name: _warm_up(plan, name) for name in names}
    taken: dict[str, list[Pace]] = {name: [] for name in names}
    with progress(f"timing {plan.experiment.name}", rounds, every=5.0) as advance:
        for _ in range(rounds):
            for name in names:
                start = time.perf_counter()
                trainer = _trainer(plan, name)
                gc.collect()  # what the one before left is not this one's to clear away
                taken[name].append(_pace(trainer, OWN if name == OURS else PEERS))
                spent[name] += time.perf_counter() - start
            advance(f"{plan.experiment.name}: a run of each")
            names = [name for name in names if spent[name] < share]
            if not names:
                break
    return {"device": plan.device, **{name: _median(paces) for name, paces in taken.items()}}


def _trainer(plan: Plan, name: str) -> RaceTrainer:
    """A contender at a step size that it does not diverge with."""
    lr = 1.0 if name == OURS else 1e-4
    return RaceTrainer(plan.config("constant", name, lr), plan.data_dir)


def _warm_up(plan: Plan, name: str) -> float:
    """A few steps of a run that does not count; how long all of it took."""
    start = time.perf_counter()
    trainer = _trainer(plan, name)
    trainer.model.train()
    for x, t in islice(_minibatches(trainer), WARM_UP):
        trainer.step(x, t)
    trainer._wait()
    return time.perf_counter() - start


def _pace(trainer: RaceTrainer, later: int) -> Pace:
    """A run's first steps, and the mean of so many later ones; taking minibatches out of the data is part of it."""
    trainer.model.train()
    minibatches = _minibatches(trainer)
    first = []
    trainer._wait()
    start = time.perf_counter()
    for x, t in islice(minibatches, FIRST):
        trainer.step(x, t)
        trainer._wait()
        first.append(time.perf_counter() - start)
    for x, t in islice(minibatches, later):
        trainer.step(x, t)
    trainer._wait()
    return {"first": first, "then": (time.perf_counter() - start - first[-1]) / later}


def _minibatches(trainer: RaceTrainer) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of one epoch after the other."""
    while True:
        yield from trainer._minibatches()
        trainer.epoch += 1


def _median(paces: Sequence[Pace]) -> Pace:
    """Step by step."""
    first = [median(at) for at in zip(*(pace["first"] for pace in paces))]
    return {"first": first, "then": median(pace["then"] for pace in paces)}
