"""``capturable``: the same step, with nothing that waits for the device."""

from __future__ import annotations

import pytest
import torch
from loops import METRICS, assert_same, metric, problem, train, values
from torch.utils._python_dispatch import TorchDispatchMode

import quasidiag as qd


class Waits(TorchDispatchMode):
    """Counts the operations that bring a number from the device to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", METRICS)
def test_same_step(kind: str) -> None:
    ends = []
    for capturable in (False, True):
        model, loss, x, t = problem()
        lr = torch.tensor(0.05, dtype=torch.float64) if capturable else 0.05
        optimizer = qd.Riemannian(
            model, loss, lr=lr, metric=kind, capturable=capturable, momentum=0.5, weight_decay=0.1
        )
        train(model, loss, optimizer, x, t, 3)
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("capturable", [False, True])
def test_the_step_does_not_wait(capturable: bool) -> None:
    model, loss, x, t = problem("gaussian")
    optimizer = qd.QDOP(model, loss, lr=0.05, capturable=capturable)
    train(model, loss, optimizer, x, t)
    optimizer.zero_grad()
    loss(model(x), t).backward()
    with Waits() as waits:
        optimizer.step()
    assert bool(waits.found) is not capturable
