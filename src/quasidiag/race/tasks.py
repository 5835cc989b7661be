"""The tasks of the race, as data: the paper's networks, deeper ones, a convolutional net and a character GPT.

Minibatches are reshuffled in every epoch. Contenders are compared by the training loss on a fixed subset of the
training data, because this is a comparison of optimizers; nothing is chosen by validation or test data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quasidiag.experiments.config import Config, suggest
from quasidiag.experiments.tasks import Experiment, Scale, power

from .contenders import CONTENDERS

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "constant": {"schedule": "constant"},
    "cosine": {"schedule": "cosine"},
}
#: The robustness runs of ours: factors on its step, minibatch sizes, and shares of each minibatch used for the metric.
FACTORS = (0.1, 0.3, 1.0, 2.0)
BATCHES = (50, 200, 1000, 2000)
SHARES = (0.1, 0.3, 1.0)
ROBUSTNESS = (
    "factor",
    *(f"batch-{size}" for size in BATCHES),
    *(f"share-{share}" for share in SHARES),
)
SCALES = ("smoke", "small", "medium", "full")


@dataclass(frozen=True)
class RaceConfig(Config):
    """The config of a run of the race, which adds the kind of network and the schedule of the step size."""

    network: str = "dense"
    schedule: str = "constant"

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RaceConfig:
        """The inverse of ``to_dict``."""
        return RaceConfig(**{**values, "layers": tuple(values["layers"])})

    @property
    def options(self) -> dict[str, Any]:
        """The options of the optimizer besides its step size."""
        name, _, share = self.variant.partition("-")
        return {"metric_fraction": float(share)} if name == "share" else {}

    def factor(self, epoch: int) -> float:
        """The factor by which the schedule multiplies the step size in ``epoch``, counted from 0."""
        if self.schedule == "constant":
            return 1.0
        return (1 + math.cos(math.pi * epoch / self.epochs)) / 2


@dataclass(frozen=True)
class Task(Experiment):
    """An experiment whose variants are schedules and whose algorithms are the contenders."""

    network: str = "dense"
    batch_size: int = 500
    kind: str = "classifier"

    def scale(self, name: str) -> Scale:
        """``smoke`` checks that it runs, ``small`` suits two cores, ``medium`` has all data, ``full`` also all epochs."""
        epochs = self.paper_epochs
        if name == "smoke":
            return Scale(2, 200, 100, None, batch_size=50, extend=0, grid_points=2)
        if name == "small":
            size = 20 * self.batch_size
            return Scale(math.ceil(0.4 * epochs), size, 1000, 5000, self.batch_size, extend=2)
        if name == "medium":
            epochs = math.ceil(0.6 * epochs)
        if name in ("medium", "full"):
            seeds = (0, 1, 2)
            return Scale(epochs, None, 5000, 10_000, self.batch_size, seeds, extend=2)
        raise suggest("scale", name, SCALES)

    def config(
        self,
        variant: str,
        algorithm: str,
        lr: float,
        *,
        seed: int = 0,
        scale: str = "small",
        dataset: str | None = None,
        device: str = "cpu",
    ) -> RaceConfig:
        """The run of one contender at one step size; robustness runs have a fifth of the epochs."""
        settings = {**self.settings(variant, scale, dataset), "network": self.network}
        if variant in ROBUSTNESS:
            settings["epochs"] = max(1, settings["epochs"] // 5)
        if variant.startswith("batch-"):
            settings["batch_size"] = int(variant.removeprefix("batch-"))
        return RaceConfig(
            variant=variant, algorithm=algorithm, lr=lr, seed=seed, device=device, **settings
        )

    def grid(self, algorithm: str, scale: str) -> list[float]:
        """The step sizes that a peer's search begins with; ours has one, the factor 1."""
        exponents = CONTENDERS[algorithm].exponents[: self.scale(scale).grid_points]
        return [power(k) for k in exponents]


def _task(name: str, title: str, layers: tuple[int, ...], epochs: int, **values: Any) -> Task:
    autoencoder = values.get("output", "categorical") != "categorical"
    # A fixed Gaussian's NLL is half the squared error plus a large constant, which would hide ratios.
    select = "train_error" if values.get("output") == "gaussian" else "train_nll"
    return Task(
        name,
        "",
        title,
        values.pop("dataset", "mnist"),
        layers,
        SCHEDULES,
        epochs,
        epochs,
        tuple(CONTENDERS),
        select=select,
        kind="autoencoder" if autoencoder else values.pop("kind", "classifier"),
        **values,
    )


RELU, SIGMOID, TANH = ({"activation": name} for name in ("relu", "sigmoid", "tanh"))
CLASSIFIER, AUTOENCODER = (784, 800, 800, 10), (784, 256, 64, 256, 784)
DEEP = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
SPARSE = (784, 2560, 1280, 640, 320, 160, 80, 40, 20, 10)
EEG = (56, 32, 16, 8, 4, 8, 16, 32, 56)

#: The most informative first, because a time limit cuts off the end of the list.
TASKS: tuple[Task, ...] = (
    _task("ae", "Autoencoder of MNIST", AUTOENCODER, 25, output="gaussian", options=SIGMOID),
    _task("deep", "Deep autoencoder of MNIST", DEEP, 25, output="gaussian", options=SIGMOID),
    _task("relu", "MNIST classifier, ReLU", CLASSIFIER, 15, options=RELU),
    _task("sigmoid", "MNIST classifier, sigmoid", CLASSIFIER, 15, options=SIGMOID),
    _task(
        "faces",
        "Autoencoder of faces",
        (2025, 256, 64, 256, 2025),
        80,
        dataset="faces",
        output="gaussian",
        options=SIGMOID,
    ),
    _task("tanh", "MNIST classifier, tanh", CLASSIFIER, 15, options=TANH),
    _task(
        "svhn",
        "SVHN classifier, ReLU",
        (1024, 800, 800, 10),
        15,
        dataset="svhn",
        options=RELU,
    ),
    _task(
        "learned",
        "Autoencoder of MNIST, learned variances",
        AUTOENCODER,
        20,
        output="learned-gaussian",
        options=SIGMOID,
    ),
    _task(
        "eeg", "Autoencoder of an EEG", EEG, 100, dataset="eeg", output="gaussian", options=SIGMOID
    ),
    _task("sparse", "Sparse nine-layer net", SPARSE, 20, options={**SIGMOID, "fan_in": 10}),
    _task(
        "convolutional",
        "Small convolutional classifier of MNIST",
        (784, 10),
        8,
        network="convolutional",
    ),
    _task(
        "gpt",
        "Character GPT on Python's standard library",
        (64, 100),
        16,
        dataset="text",
        network="gpt",
        kind="language model",
        batch_size=64,
    ),
)
BY_NAME = {task.name: task for task in TASKS}


def find(name: str) -> Task:
    """A task by name; an unknown name raises an error with a suggestion."""
    if name not in BY_NAME:
        raise suggest("task", name, BY_NAME)
    return BY_NAME[name]
