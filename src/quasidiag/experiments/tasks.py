"""The paper's experiments, as data.

Minibatches have 500 samples, in the order of the file; the first 5/6 of the data are for training.
Step sizes are powers of ten, fixed during a run; each algorithm is shown at its best one. There are
three scales: ``smoke`` (takes seconds, to see that it runs), ``small`` (a part of the data; all
experiments in about half an hour on two cores) and ``paper`` (all data, full length; for a GPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .algorithms import ALGORITHMS, INEXACT, known_gamma
from .config import Config, suggest

#: Exponents of ten with which the search for a step size begins; the grid is extended while the best is at an end.
GRID: Mapping[str, tuple[int, ...]] = {
    "SGD": (-2, -1, 0),
    "AdaGrad": (-4, -3, -2),
    "DOP": (-4, -3, -2),
    "QDOP": (-3, -2, -1),
    "DMCNat": (-4, -3, -2),
    "QDMCNat": (-3, -2, -1),
    "DNat": (-4, -3, -2),
    "QDNat": (-3, -2, -1),
}


@dataclass(frozen=True)
class Scale:
    """The length and data of a run; ``extend``: by how many powers of ten the grid may grow on each side."""

    epochs: int
    train_size: int | None = None
    valid_size: int | None = None
    eval_size: int | None = None
    batch_size: int = 500
    seeds: tuple[int, ...] = (0,)
    extend: int = 4
    grid_points: int | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper: the data, the network, the algorithms, and what varies.

    The best step size is the one with the lowest final ``select``. With ``common_grid`` a step size
    tried on one variant is tried on all, so that variants can be compared at the same step size.
    """

    name: str
    paper: str
    title: str
    dataset: str
    layers: tuple[int, ...]
    variants: Mapping[str, Mapping[str, Any]]
    paper_epochs: int
    small_epochs: int
    algorithms: tuple[str, ...] = ALGORITHMS
    output: str = "categorical"
    select: str = "train_nll"
    common_grid: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def scale(self, name: str) -> Scale:
        """What the scales ``smoke``, ``small`` and ``paper`` mean for this experiment."""
        if name == "smoke":
            return Scale(2, 200, 100, None, batch_size=50, extend=1, grid_points=2)
        if name == "small":
            return Scale(self.small_epochs, 5000, 2000, None)
        if name == "paper":
            return Scale(self.paper_epochs, eval_size=10_000, seeds=(0, 1, 2))
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
    ) -> Config:
        """The run of one algorithm at one step size."""
        if variant not in self.variants:
            raise suggest("variant", variant, self.variants)
        return Config(
            variant=variant,
            algorithm=algorithm,
            lr=lr,
            seed=seed,
            gamma=known_gamma(algorithm),
            device=device,
            **self.settings(variant, scale, dataset),
        )

    def settings(self, variant: str, scale: str, dataset: str | None = None) -> dict[str, Any]:
        """The fields of the config that all runs of a variant share."""
        size = self.scale(scale)
        return {
            "experiment": self.name,
            "scale": scale,
            "dataset": dataset or self.dataset,
            "layers": self.layers,
            "output": self.output,
            "epochs": size.epochs,
            "batch_size": size.batch_size,
            "train_size": size.train_size,
            "valid_size": size.valid_size,
            "eval_size": size.eval_size,
            **self.options,
            **self.variants.get(variant, {}),
        }

    def grid(self, algorithm: str, scale: str) -> list[float]:
        """The step sizes that the search begins with, smallest first."""
        exponents = GRID[algorithm][: self.scale(scale).grid_points]
        return [power(k) for k in exponents]


def power(exponent: int) -> float:
    """``10 ** exponent``, read from a literal so that a config's hash does not depend on rounding."""
    return float(f"1e{exponent}")


SIGMOID = {"sigmoid": {"activation": "sigmoid"}}
TANH = {"tanh": {"activation": "tanh"}}
RELU = {"relu": {"activation": "relu"}}

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "inversion",
        "Fig. 1",
        "MNIST, pixels as given and inverted",
        "mnist",
        (784, 100, 10),
        {"original": {"inverted": False}, "inverted": {"inverted": True}},
        paper_epochs=20,
        small_epochs=10,
        common_grid=True,
    ),
    Experiment(
        "mnist",
        "Fig. 2",
        "MNIST classification",
        "mnist",
        (784, 800, 800, 10),
        {**SIGMOID, **TANH, **RELU},
        paper_epochs=20,
        small_epochs=5,
    ),
    Experiment(
        "dropout",
        "Fig. 3",
        "MNIST classification with dropout",
        "mnist",
        (784, 800, 800, 10),
        {**SIGMOID, **RELU},
        paper_epochs=100,
        small_epochs=5,
        select="valid_nll",
        options={"dropout": 0.5, "input_dropout": 0.2},
    ),
    Experiment(
        "svhn",
        "Fig. 4",
        "Street-view house numbers in grey",
        "svhn",
        (1024, 800, 800, 10),
        {**SIGMOID, **RELU},
        paper_epochs=20,
        small_epochs=5,
    ),
    Experiment(
        "sparse",
        "Fig. 5",
        "MNIST with a sparse network, ten inputs a unit",
        "mnist",
        (784, 2560, 1280, 640, 320, 160, 80, 40, 20, 10),
        dict(SIGMOID),
        paper_epochs=40,
        small_epochs=10,
        options={"fan_in": 10},
    ),
    Experiment(
        "faces",
        "Fig. 6",
        "Autoencoder of faces, unit variances",
        "faces",
        (2025, 256, 64, 256, 2025),
        dict(SIGMOID),
        paper_epochs=60,
        small_epochs=10,
        algorithms=INEXACT,
        output="gaussian",
    ),
    Experiment(
        "eeg",
        "Fig. 7",
        "Autoencoder of an electroencephalogram",
        "eeg",
        (56, 32, 16, 8, 4, 8, 16, 32, 56),
        dict(SIGMOID),
        paper_epochs=200,
        small_epochs=20,
        output="gaussian",
    ),
    Experiment(
        "mnist-ae",
        "Fig. 8",
        "Autoencoder of MNIST, learned variances",
        "mnist",
        (784, 256, 64, 256, 784),
        dict(SIGMOID),
        paper_epochs=30,
        small_epochs=10,
        algorithms=INEXACT,
        output="learned-gaussian",
    ),
)

TIMING = "timing"  # Table 1: it measures time, not a trained network, so it has a module of its own
SCALES = ("smoke", "small", "paper")
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
NAMES = (
    "inversion",
    "mnist",
    TIMING,
    *(name for name in BY_NAME if name not in ("inversion", "mnist")),
)


def find(name: str) -> Experiment:
    """An experiment by name; an unknown name raises an error with a suggestion."""
    if name not in BY_NAME:
        raise suggest("experiment", name, NAMES)
    return BY_NAME[name]
