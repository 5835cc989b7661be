"""``precondition_()`` in front of any other optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, problem, train, values
from torch import nn

import quasidiag as qd

OTHERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)],
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01)],
    "Muon": lambda model: [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01),
        torch.optim.SGD([p for p in model.parameters() if p.dim() != 2], lr=0.01),
    ],
}


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
@pytest.mark.parametrize("kind", METRICS)
def test_in_front_of_sgd_it_is_the_optimizer_itself(kind: str, reduction: str) -> None:
    options: dict[str, Any] = dict(metric=kind, reduction=reduction, seed=4)
    whole, loss, x, t = problem()
    optimizer = qd.Riemannian(whole, loss, lr=0.05, momentum=0.5, **options)
    train(whole, loss, optimizer, x, t, 4)

    model, loss, x, t = problem()
    geometry = qd.Riemannian(model, loss, step="fixed", **options)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for _ in range(4):
        sgd.zero_grad()
        loss(model(x), t).backward()
        geometry.precondition_()
        sgd.step()
    assert_same(values(whole), values(model))


@pytest.mark.parametrize("name", OTHERS)
def test_in_front_of(name: str) -> None:
    """The other optimizer goes as it would with the Riemannian gradient from elsewhere."""
    if name == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model, loss, x, t = problem()
    geometry, others = qd.QDOP(model, loss), OTHERS[name](model)
    source, twin = (problem()[0] for _ in range(2))
    reference, twins = qd.QDOP(source, loss, lr=1.0), OTHERS[name](twin)
    before = values(model)
    for _ in range(5):
        source.load_state_dict(model.state_dict())
        train(source, loss, reference, x, t)
        for p, start, end in zip(twin.parameters(), values(model), values(source), strict=True):
            p.grad = start - end
        for other in twins:
            other.step()
        model.zero_grad()
        loss(model(x), t).backward()
        geometry.precondition_()
        for other in others:
            other.step()
        assert_same(values(twin), values(model), 1e-9)
    assert_moved(before, model)
    assert len(metric(geometry)) == 2 * 3 + 2  # m0i, mii and shift of each weight, m00 of each bias
    assert not geometry._collector.records


def test_it_moves_no_parameter_and_needs_a_gradient() -> None:
    model, loss, x, t = problem()
    geometry = qd.QDOP(model, loss)
    with pytest.raises(RuntimeError, match="backward"):
        geometry.precondition_()
    before = values(model)
    loss(model(x), t).backward()
    geometry.precondition_()
    assert_same(before, values(model), 0.0)


def test_what_is_skipped_leaves_no_gradient_to_the_other() -> None:
    model, loss, x, t = problem()
    geometry, sgd = qd.QDOP(model, loss), torch.optim.SGD(model.parameters(), lr=0.05)
    before = values(model)
    loss(model(x * math.nan), t).backward()
    with pytest.warns(RuntimeWarning, match="skipped") as said:
        geometry.precondition_()
    assert said[0].filename == __file__  # and not a line of the library's
    sgd.step()
    assert_same(before, values(model), 0.0)
    assert not geometry.state
