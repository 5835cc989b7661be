"""After how many steps ours is where a tuned peer ends.

The curves of the race have a point an epoch, and whoever is there after nineteen steps is lost between two of them. Here
the training loss is evaluated after each of the first steps, later after every fifth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .contenders import OURS
from .plan import Plan
from .summary import REFERENCE, summarise
from .train import RaceTrainer

#: So many first steps are all looked at.
EVERY_ONE = 30


def wanted(plan: Plan) -> list[float]:
    """The losses that AdamW has after its first epoch and at its end, the higher first; none before its search is over."""
    rows = {row["contender"]: row for row in summarise(plan)["contenders"]}
    row = rows.get(REFERENCE)
    return [] if row is None else sorted({row["first"], row["final"]}, reverse=True)


def steps_to(trainer: RaceTrainer, key: str, levels: Sequence[float], limit: int) -> dict[str, int]:
    """The step after which the training loss is first seen at or below each level; those not reached are left out."""
    found: dict[str, int] = {}
    left = list(levels)
    for number, loss in _losses(trainer, key, limit):
        while left and loss <= left[0]:
            found[f"{left.pop(0):.6g}"] = number
        if not left:
            break
    return found


def measure(plan: Plan, levels: Sequence[float]) -> dict[str, int]:
    """Ours on one task, as long as a run at most."""
    config = plan.config("constant", OURS, 1.0)
    trainer = RaceTrainer(config, plan.data_dir)
    limit = config.epochs * (len(trainer.data.train[0]) // config.batch_size)
    return steps_to(trainer, plan.experiment.select, levels, limit)


def _losses(trainer: RaceTrainer, key: str, limit: int) -> Iterator[tuple[int, float]]:
    number = 0
    while True:
        for x, t in trainer._minibatches():
            if number == limit:
                return
            trainer.model.train()
            trainer.step(x, t)
            number += 1
            if number <= EVERY_ONE or number % 5 == 0:
                loss = trainer.evaluate()[key]
                yield number, math.inf if loss is None else loss
        trainer.epoch += 1
