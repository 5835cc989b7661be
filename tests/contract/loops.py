"""What the contract's tests share: a small network with its batch, training steps, and equality of networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, criterion, mlp

SIZES = (4, 6, 3)
METRICS = ("outer-product", "monte-carlo", "exact", "backpropagated")

Maker = Callable[..., torch.optim.Optimizer]


def problem(
    output: str = "categorical", n: int = 24, seed: int = 0
) -> tuple[nn.Sequential, qd.OutputModel, Tensor, Tensor]:
    """A float64 network, its criterion, and a batch."""
    x, t = batch(output, n, SIZES[0], SIZES[-1], seed)
    return mlp(*SIZES, seed=seed), criterion(output), x, t


def train(
    model: nn.Module, loss: nn.Module, optimizer: Any, x: Tensor, t: Tensor, steps: int = 1
) -> None:
    """The loop that everybody has."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def metric(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor of the optimizer's state, in a fixed order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        optimizer.state[p][key].clone()
        for p in parameters
        for key in sorted(optimizer.state[p])
        if isinstance(optimizer.state[p][key], Tensor)
    ]


def assert_same(left: list[Tensor], right: list[Tensor], tolerance: float = 1e-12) -> None:
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_moved(before: list[Tensor], model: nn.Module, least: float = 1e-4) -> None:
    """Against tests that pass because nothing happens."""
    after = values(model)
    assert max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)) > least
