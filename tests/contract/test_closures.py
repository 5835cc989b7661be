"""``step(closure)``: evaluates it once, with gradients, and returns its loss."""

from __future__ import annotations

import pytest
import torch
from loops import METRICS, assert_same, metric, problem, train, values
from torch import Tensor

import quasidiag as qd


@pytest.mark.parametrize("kind", METRICS)
def test_closure_equals_the_usual_loop(kind: str) -> None:
    plain, loss, x, t = problem()
    usual = qd.Riemannian(plain, loss, lr=0.05, metric=kind, seed=2)
    train(plain, loss, usual, x, t, 3)

    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, seed=2)
    calls: list[Tensor] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        value = loss(model(x), t)
        value.backward()
        calls.append(value.detach())
        return value

    found = [optimizer.step(closure) for _ in range(3)]
    assert [v.item() for v in found] == [v.item() for v in calls]
    assert found[-1].item() < found[0].item()
    assert_same(values(plain) + metric(usual), values(model) + metric(optimizer), 0.0)


def test_step_without_closure_returns_nothing() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    loss(model(x), t).backward()
    assert optimizer.step() is None
