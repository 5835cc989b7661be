"""A small problem that one rank or several can train on: the same samples, the same model, float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import quasidiag as qd

STEPS, BATCH = 6, 24
Batch = tuple[Tensor, Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def batches(steps: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, BATCH, 6, generator=generator, dtype=torch.float64) + 3.0
    t = torch.randint(0, 3, (steps, BATCH), generator=generator)
    return list(zip(x, t))


def part(batch: Batch, rank: int, size: int, sizes: list[int] | None = None) -> Batch:
    """This rank's samples; with ``sizes``, so many for each."""
    x, t = batch
    sizes = sizes or [len(x) // size] * size
    return x.split(sizes)[rank], t.split(sizes)[rank]


def train(
    network: nn.Module,
    optimizer: qd.Riemannian,
    data: list[Batch],
    criterion: nn.Module | None = None,
    weight: Callable[[int], float] = lambda n: 1.0,
) -> None:
    criterion = criterion or nn.CrossEntropyLoss()
    for x, t in data:
        optimizer.zero_grad()
        (criterion(network(x), t) * weight(len(x))).backward()
        optimizer.step()


def optimizer(network: nn.Module, name: str, **options: Any) -> tuple[qd.Riemannian, nn.Module]:
    """One of the metrics by name, with the criterion that it goes with; "loss" is the outer product of any loss."""
    settings: dict[str, Any] = dict(lr=0.02, gamma=0.2, momentum=0.5) | options
    if name == "loss":
        return qd.Riemannian(network, **settings), nn.CrossEntropyLoss()
    criterion = qd.Categorical()
    return qd.Riemannian(network, criterion, metric=name, **settings), criterion


def numbers(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()]).clone()


def alone(name: str, steps: int = STEPS, **options: Any) -> Tensor:
    """The parameters after training on one rank with all samples."""
    network = model()
    rule, criterion = optimizer(network, name, process_group=None, **options)
    train(network, rule, batches(steps), criterion)
    return numbers(network)


def same(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
