"""No reference to a batch survives ``step()``, whoever still holds the loss; and hooks hold nothing in the end."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from loops import METRICS, SIZES, problem, train
from torch import Tensor, nn

import quasidiag as qd
from nets import mlp


def array(n: int = 6) -> np.ndarray:
    """Memory that a tensor can borrow, and that says when it is gone."""
    return np.random.default_rng(0).standard_normal((n, SIZES[0]))


@pytest.mark.parametrize("kind", [*METRICS, "no criterion"])
def test_batch_is_free_after_the_step_though_the_loss_lives(kind: str) -> None:
    model = mlp(*SIZES)
    if kind == "no criterion":
        loss: nn.Module = nn.CrossEntropyLoss()
        optimizer: qd.Riemannian = qd.QDOP(model, lr=0.05)
    else:
        loss = qd.Categorical()
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    alive: list[weakref.ref[np.ndarray]] = []
    kept: list[Tensor] = []
    for _ in range(3):
        data = array()
        alive.append(weakref.ref(data))
        value = loss(model(torch.from_numpy(data)), torch.arange(6) % 3)
        del data
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(value)  # with its graph
    assert [ref() for ref in alive] == [None] * 3


@pytest.mark.parametrize("kind", METRICS)
def test_a_refused_batch_is_free_too(kind: str) -> None:
    model, loss = mlp(*SIZES), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    data = array()
    alive = weakref.ref(data)
    data[0, 0] = np.nan
    value = loss(model(torch.from_numpy(data)), torch.arange(6) % 3)
    del data
    value.backward()
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    assert alive() is None


@pytest.mark.parametrize("kind", METRICS)
def test_optimizer_model_and_graph_go_together(kind: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    train(model, loss, optimizer, x, t)
    alive = [weakref.ref(thing) for thing in (model, optimizer, model[0].weight)]
    del model, optimizer, loss
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_a_dropped_optimizer_is_deaf() -> None:
    """Also without close(): its hooks hold it weakly."""
    model, loss, x, t = problem()
    optimizer = qd.QDNat(model, loss, lr=0.05)
    collector = weakref.ref(optimizer._collector)
    del optimizer
    gc.collect()
    assert collector() is None
    loss(model(x), t).backward()


@pytest.mark.parametrize("kind", METRICS)
def test_evaluation_leaves_nothing(kind: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    with torch.no_grad():
        loss(model(x), t)
    model.eval()
    loss(model(x), t).backward()
    assert not optimizer._collector.records
    assert not optimizer._collector.probe.uses
    assert len(optimizer._collector.probe.loans._loans) == 0
