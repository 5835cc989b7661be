"""``deepcopy`` and ``pickle``: of the model alone, and of model and optimizer together."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, problem, train, values
from torch.optim.lr_scheduler import StepLR

import quasidiag as qd


def through_torch_save(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("way", WAYS)
def test_both_together_go_on_alike_and_apart(way: str, kind: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, momentum=0.5, seed=5)
    train(model, loss, optimizer, x, t, 2)
    model2, loss2, optimizer2 = WAYS[way]((model, loss, optimizer))
    assert optimizer2.model is model2
    assert optimizer2.criterion is loss2
    before = values(model2)
    train(model, loss, optimizer, x, t, 2)
    assert_same(before, values(model2), 0.0)  # what one does is nothing to the other
    train(model2, loss2, optimizer2, x, t, 2)
    assert_same(values(model), values(model2), 0.0)
    assert_same(metric(optimizer), metric(optimizer2), 0.0)
    optimizer2.close()
    hooks = [h for m in model2.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert hooks == []
    before = values(model)
    train(model, loss, optimizer, x, t)
    assert_moved(before, model)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_alone_leaves_the_optimizer_behind(way: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDNat(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    twin = WAYS[way](model)
    loss(twin(x), t).backward()
    assert not [*optimizer._collector.probe.loans]
    assert not optimizer._collector.records
    other = qd.QDNat(twin, loss, lr=0.05)
    twin.zero_grad()
    train(twin, loss, other, x, t)
    other.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_alone_brings_its_model(way: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    twin = WAYS[way](optimizer)
    assert twin.model is not model
    train(twin.model, twin.criterion, twin, x, t)
    train(model, loss, optimizer, x, t)
    assert_same(values(model), values(twin.model), 0.0)


def test_with_a_scheduler_and_hooks_that_cannot_be_pickled() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    scheduler = StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: None)
    train(model, loss, optimizer, x, t)
    scheduler.step()
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.param_groups[0]["lr"] == pytest.approx(0.005)
    train(twin.model, twin.criterion, twin, x, t)


def test_between_backward_and_step() -> None:
    """Neither gradients nor what the metric saw of them are copied: the copy begins with its own backward pass."""
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    optimizer.zero_grad()
    loss(model(x), t).backward()
    twin = copy.deepcopy(optimizer)
    assert not twin._collector.records
    with pytest.raises(RuntimeError, match="backward"):
        twin.step()
    train(twin.model, twin.criterion, twin, x, t)
    optimizer.step()
    assert_same(values(model), values(twin.model), 0.0)
