"""Times the first and later steps of every contender, in turns, so that other load on the machine affects all alike."""

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

#: Untimed steps at first, enough for all one-time initialisation, including that of work done every tenth step.
WARM_UP = 11
#: How many of a run's first steps are timed one by one: they cost more than later ones, and not all the same.
FIRST = 20
#: How many later steps are timed together, for ours and for peers: multiples of the periods of work that is not done in
#: every step. At first ours measures its model every sixth and its metric every eighth step; SOAP, SINGD and K-FAC
#: theirs every tenth.
OWN, PEERS = 24, 20


class Pace(TypedDict):
    """``first``: seconds from the start of a run to the end of each of its first steps; ``then``: seconds per later step."""

    first: list[float]
    then: float


def elapsed(pace: Pace, steps: float) -> float:
    """Seconds from the start of a run until ``steps`` steps are done, which need not be a whole number."""
    first = pace["first"]
    whole = min(int(steps), len(first))
    before = first[whole - 1] if whole else 0.0
    following = first[whole] - before if whole < len(first) else pace["then"]
    return before + (steps - whole) * following


def measure(plan: Plan, rounds: int = 7, seconds: float | None = None) -> dict[str, Any]:
    """The pace of every contender on one task: the median of up to ``rounds`` runs, each from a fresh start.

    Contenders share ``seconds`` evenly; one that has used up its share takes no further runs, but each has at least one.
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
                gc.collect()  # so that no garbage of the previous contender is collected here
                taken[name].append(_pace(trainer, OWN if name == OURS else PEERS))
                spent[name] += time.perf_counter() - start
            advance(f"{plan.experiment.name}: a run of each")
            names = [name for name in names if spent[name] < share]
            if not names:
                break
    return {"device": plan.device, **{name: _median(paces) for name, paces in taken.items()}}


def _trainer(plan: Plan, name: str) -> RaceTrainer:
    """A fresh run of a contender, at a step size with which it does not diverge."""
    lr = 1.0 if name == OURS else 1e-4
    return RaceTrainer(plan.config("constant", name, lr), plan.data_dir)


def _warm_up(plan: Plan, name: str) -> float:
    """Do a few steps of a run that is then discarded; return the seconds that this took."""
    start = time.perf_counter()
    trainer = _trainer(plan, name)
    trainer.model.train()
    for x, t in islice(_minibatches(trainer), WARM_UP):
        trainer.step(x, t)
    trainer._wait()
    return time.perf_counter() - start


def _pace(trainer: RaceTrainer, later: int) -> Pace:
    """Time the first steps of a run, and the mean of ``later`` further ones; this includes fetching the minibatches."""
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
    """An endless stream of minibatches, epoch after epoch."""
    while True:
        yield from trainer._minibatches()
        trainer.epoch += 1


def _median(paces: Sequence[Pace]) -> Pace:
    """The median over runs, for each step separately."""
    first = [median(at) for at in zip(*(pace["first"] for pace in paces))]
    return {"first": first, "then": median(pace["then"] for pace in paces)}
