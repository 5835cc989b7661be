"""Small sets of records with a known outcome, for what only the arithmetic of a report decides."""

from __future__ import annotations

import numpy as np

from quasidiag.experiments.algorithms import ALGORITHMS
from quasidiag.experiments.report_runs import Pictures, Record, Task


def record(
    experiment: str = "mnist",
    variant: str = "sigmoid",
    algorithm: str = "SGD",
    lr: float = 0.1,
    seed: int = 0,
    *,
    start: float = 2.3,
    rate: float = 0.9,
    epochs: int = 10,
    diverged: bool = False,
    output: str = "categorical",
    valid_error: float = 0.02,
    scale: str = "paper",
    pictures: Pictures | None = None,
) -> Record:
    """A run whose training loss is start·rate^epoch."""
    epoch = np.arange(epochs + 1)
    train = start * rate**epoch
    curve = {
        "epoch": epoch,
        "seconds": 1.5 * epoch,
        "train_nll": train,
        "valid_nll": train + 0.01,
        "train_error": train if output != "categorical" else train / start,
        "valid_error": np.full(epochs + 1, valid_error),
    }
    if output != "categorical":
        curve["train_mse"] = train / 10
    config = {
        "epochs": epochs,
        "output": output,
        "scale": scale,
        "batch_size": 500,
        "dataset": "mnist",
    }
    columns = {name: [float(value) for value in column] for name, column in curve.items()}
    task = Task(experiment, variant)
    return Record(task, algorithm, lr, seed, columns, diverged, pictures, config)


def grid(finals: dict[float, float | None], **rest: object) -> list[Record]:
    """A run for each step size, ending at the given training loss; None diverges."""
    return [
        record(lr=lr, start=final or 1.0, rate=1.0, diverged=final is None, **rest)  # type: ignore[arg-type]
        for lr, final in finals.items()
    ]


def pictures(shift: int = 0, count: int = 4, side: int = 9) -> Pictures:
    inputs = np.arange(count * side * side, dtype=np.uint8).reshape(count, side, side) % 200
    return Pictures(inputs, inputs + np.uint8(shift))


def timing(ratio: float = 1.9) -> dict[str, object]:
    paper = (29.10, 33.39, 42.44, 56.68, 58.17, 68.01, 120.16, 129.76)
    rows = [
        {
            "algorithm": name,
            "seconds_per_epoch": 1.0 if name == "SGD" else ratio,
            "ratio": 1.0 if name == "SGD" else ratio,
            "ratio_low": 0.95,
            "ratio_high": 1.05 * ratio,
            "paper_seconds": seconds,
            "paper_ratio": round(seconds / paper[0], 2),
        }
        for name, seconds in zip(ALGORITHMS, paper, strict=True)
    ]
    table = {"layers": [784, 800, 800, 10], "batch_size": 500, "scale": "paper"}
    table |= {"device_name": "a processor", "threads": 1, "torch": "2.6", "rounds": 5}
    return {"cpu": {**table, "steps_per_round": 20, "rows": rows}}
