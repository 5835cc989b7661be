"""``step(closure)``: evaluates it once, with gradients, and returns its loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quasidiag as qd
from loops import METRICS, assert_same, metric, problem, train, values


@pytest.mark.parametrize("kind", METRICS)
def test_closure_equals_the_usual_loop(kind: str) -> None:
    ends = []
    for by_closure in (False, True):
        model, loss, x, t = problem()
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, seed=2)
        if not by_closure:
            train(model, loss, optimizer, x, t, 3)
        else:
            calls: list[Tensor] = []

            def closure(model=model, loss=loss, optimizer=optimizer, calls=calls) -> Tensor:
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                value = loss(model(x), t)
                value.backward()
                calls.append(value.detach())
                return value

            found = [optimizer.step(closure) for _ in range(3)]
            assert len(calls) == 3
            assert [float(v) for v in found] == [float(v) for v in calls]
            assert float(found[-1]) < float(found[0])
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends, tolerance=0.0)


def test_step_without_closure_returns_nothing() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    loss(model(x), t).backward()
    assert optimizer.step() is None
