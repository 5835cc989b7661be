"""Does the cheaper metric train as well? Training loss after each epoch on MNIST, full metric beside amortised.

It trains the paper's classifier, 784-800-800-10 with sigmoids, from the authors' initialisation, on minibatches of 500 in
the order of the file. When the metric is updated only every k steps, the weight of an update in its moving average is
:math:`1 - (1-γ)^k`, so that it averages over as many steps as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import quasidiag as qd
from quasidiag.bench.presets import PAPERS_NET
from quasidiag.experiments import datasets
from quasidiag.experiments.config import Config
from quasidiag.experiments.models import build

BATCH, GAMMA = 500, 0.01
#: The step sizes at which the variants are compared.
RATES = (1e-3, 3e-4)


def every(k: int) -> dict[str, Any]:
    """The options of a metric that is updated every ``k`` steps."""
    return {"metric_every": k, "gamma": 1 - (1 - GAMMA) ** k}


#: The part of a name before the comma is the variant with the full metric, with which it is compared.
VARIANTS: dict[str, tuple[type[qd.Riemannian], dict[str, Any]]] = {
    "QDOP": (qd.QDOP, {}),
    "QDOP, metric every 5": (qd.QDOP, every(5)),
    "QDOP, metric every 10": (qd.QDOP, every(10)),
    "QDOP, metric on 1/5": (qd.QDOP, {"metric_fraction": 0.2}),
    "QDOP, metric on 1/10": (qd.QDOP, {"metric_fraction": 0.1}),
    "QDMCNat": (qd.QDMCNat, {}),
    "QDMCNat, other draws": (qd.QDMCNat, {"seed": 1}),
    "QDMCNat, metric every 5": (qd.QDMCNat, every(5)),
    "QDMCNat, metric every 10": (qd.QDMCNat, every(10)),
    "QDMCNat, metric on 1/5": (qd.QDMCNat, {"metric_fraction": 0.2}),
    "QDMCNat, metric on 1/10": (qd.QDMCNat, {"metric_fraction": 0.1}),
}


def run(
    device: str,
    data_dir: str | None,
    epochs: int,
    say: Callable[[str], None],
    dataset: str = "mnist",
    rates: Sequence[float] = RATES,
) -> list[dict[str, Any]]:
    """For each step size: losses after each epoch, and each variant's largest relative difference to the full metric."""
    data = datasets.load(dataset, data_dir)
    assert data.labels is not None
    n = data.train_size
    x = torch.tensor(data.inputs[:n], device=device).float() / 255
    t = torch.tensor(data.labels[:n], device=device).long()
    found = []
    for lr in rates:
        losses: dict[str, list[float]] = {}
        for name, (kind, options) in VARIANTS.items():
            losses[name] = _train(kind, {"gamma": GAMMA, **options}, x, t, epochs, lr)
            say(f"{name} at {lr:g}: {' '.join(f'{v:.4f}' for v in losses[name])}")
        found.append({"dataset": dataset, "lr": lr, "losses": losses, "departure": _off(losses)})
    return found


def _off(losses: dict[str, list[float]]) -> dict[str, float]:
    full = {name: losses[name.partition(",")[0]] for name in losses}
    return {
        name: max(abs(a / b - 1) for a, b in zip(values, full[name]))
        for name, values in losses.items()
    }


def _train(
    kind: type[qd.Riemannian], options: dict[str, Any], x: Tensor, t: Tensor, epochs: int, lr: float
) -> list[float]:
    model, criterion = build(
        Config("bench", "", kind.__name__, lr, "mnist", layers=PAPERS_NET, epochs=epochs)
    )
    model.to(x.device)
    criterion.to(x.device)
    optimizer = kind(model, criterion, lr=lr, **options)
    found = []
    for _ in range(epochs):
        model.train()
        for batch, target in zip(x.split(BATCH), t.split(BATCH)):
            optimizer.zero_grad()
            criterion(model(batch), target).backward()
            optimizer.step()
        found.append(_loss(model, criterion, x, t))
    optimizer.close()
    return found


@torch.no_grad()
def _loss(model: nn.Module, criterion: nn.Module, x: Tensor, t: Tensor) -> float:
    model.eval()
    parts = [criterion(model(a), b) for a, b in zip(x.split(5000), t.split(5000))]
    return float(torch.stack(parts).mean())
