"""Executes a run: trains, evaluates, writes the results to disk, and resumes where a killed process stopped."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import quasidiag as qd

from .config import Config
from .runs import Line, RunDir
from .train import Trainer

OnEpoch = Callable[[Line], None]


def environment(device: str, source: str) -> dict[str, Any]:
    """Versions, hardware, data source and start time of a run."""
    name = torch.cuda.get_device_name() if device != "cpu" else platform.processor() or "cpu"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "quasidiag": qd.__version__,
        "platform": f"{platform.system()}-{platform.machine()}",
        "device_name": name,
        "threads": torch.get_num_threads(),
        "data": source,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def execute(
    config: Config,
    root: str | os.PathLike[str],
    *,
    data_dir: str | None = None,
    deadline: float | None = None,
    checkpoint_seconds: float = 10.0,
    on_epoch: OnEpoch | None = None,
    graph: bool = True,
    make: Callable[..., Trainer] = Trainer,
) -> Line | None:
    """Do a run, from its checkpoint if there is one, and return its result.

    Returns None if the ``deadline`` (a ``time.time()``) came first; call again to go on.
    """
    store = RunDir(root, config)
    with store.locked(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        done = store.result
        if done is not None:
            return done
        if deadline is not None and time.time() > deadline:
            return None
        torch.set_flush_denormal(True)
        trainer = make(config, data_dir, graph)
        store.begin(environment(config.device, trainer.data.source))
        if not store.restore(trainer):
            store.append(trainer.evaluate())
        return _loop(store, trainer, deadline, checkpoint_seconds, on_epoch)


def _loop(
    store: RunDir,
    trainer: Trainer,
    deadline: float | None,
    checkpoint_seconds: float,
    on_epoch: OnEpoch | None,
) -> Line | None:
    config, saved, line = trainer.config, time.time(), store.metrics()[-1]
    while trainer.epoch < config.epochs:
        try:
            trainer.train_epoch()
        except FloatingPointError:  # the optimizer saw a gradient that is not finite
            trainer.epoch += 1
            line = dict.fromkeys(line) | {"epoch": trainer.epoch, "seconds": trainer.seconds}
            store.append(line)
            break
        if trainer.epoch % config.eval_every == 0 or trainer.epoch == config.epochs:
            line = trainer.evaluate()
            store.append(line)
            if on_epoch:
                on_epoch(line)
            if line["train_nll"] is None:
                break
        out_of_time = deadline is not None and time.time() > deadline
        if out_of_time or time.time() - saved >= checkpoint_seconds:
            store.save(trainer)
            saved = time.time()
        if out_of_time and trainer.epoch < config.epochs:
            return None
    return store.finish(trainer, divergence(store.metrics()[0], line))


def divergence(initial: Line, final: Line) -> str | None:
    """Why a run counts as diverged, or None. Divergence is a result like any other, not an error."""
    if final["train_nll"] is None:
        return "non-finite"
    return "worse than the start" if final["train_nll"] > initial["train_nll"] else None
