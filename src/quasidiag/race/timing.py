"""The time of a step of every contender, in turns, so that whatever else the machine does falls on all of them."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from quasidiag.experiments.progress import progress

from .contenders import CONTENDERS, OURS
from .plan import Plan
from .train import RaceTrainer

#: Steps before the first measurement: every contender has its state, and what is done every tenth step was done.
WARM_UP = 11


def measure(
    plan: Plan, rounds: int = 7, steps: int = 10, seconds: float | None = None
) -> dict[str, Any]:
    """Median seconds a step on one task; ``steps`` is a multiple of what any contender does only now and then.

    ``seconds`` ends the rounds early, after two at the least.
    """
    names = [name for name in CONTENDERS if name in plan.algorithms]
    trainers = {name: _trainer(plan, name) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for trainer in trainers.values():
        _steps(trainer, WARM_UP)
    with progress(f"timing {plan.experiment.name}", rounds, every=5.0) as advance:
        for number in range(rounds):
            for name, trainer in trainers.items():
                taken[name].append(_steps(trainer, steps) / steps)
            advance(f"{plan.experiment.name}: {steps} steps of each")
            late = seconds is not None and time.perf_counter() - start > seconds
            if late and number:
                break
    return {"device": plan.device, **{name: median(values) for name, values in taken.items()}}


def _trainer(plan: Plan, name: str) -> RaceTrainer:
    """A contender at a step size that it does not diverge with."""
    lr = 1.0 if name == OURS else 1e-4
    return RaceTrainer(plan.config("constant", name, lr), plan.data_dir)


def _steps(trainer: RaceTrainer, count: int) -> float:
    trainer.model.train()
    trainer._wait()
    start = time.perf_counter()
    done = 0
    while done < count:
        for x, t in trainer._minibatches():
            trainer.step(x, t)
            done += 1
            if done == count:
                break
    trainer._wait()
    return time.perf_counter() - start
