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
    assert not [*optimizer._collector.probe.loans]


@pytest.mark.parametrize("ends", ["at the output", "at the loss", "in zero_grad"])
@pytest.mark.parametrize("kind", [*METRICS, "auto"])
def test_passes_that_nothing_follows_leave_nothing(kind: str, ends: str) -> None:
    """In training mode, as when somebody watches a loss and forgets ``no_grad``; the last one may still be needed."""
    model, loss, x, t = problem()
    options = {} if kind == "auto" else {"lr": 0.05, "metric": kind}
    optimizer = qd.Riemannian(model, loss, **options)
    train(model, loss, optimizer, x, t)
    alive: list[weakref.ref[np.ndarray]] = []
    for _ in range(4):
        data = array()
        alive.append(weakref.ref(data))
        y = model(torch.from_numpy(data))
        del data
        if ends != "at the output":
            loss(y, torch.arange(6) % 3)
        if ends == "in zero_grad":
            optimizer.zero_grad()
        del y
    assert [ref() for ref in alive[:-1]] == [None] * 3
    train(model, loss, optimizer, x, t)
    assert alive[-1]() is None


@pytest.mark.parametrize("layer", [nn.LSTM, nn.RNN])
def test_nor_do_those_of_composite_layers(layer: type[nn.LSTM]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = layer(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x)[0][:, -1])

    model, loss = Net(), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric="monte-carlo")
    alive: list[weakref.ref[np.ndarray]] = []
    for _ in range(3):
        data = np.zeros((6, 2, 4), np.float32)
        alive.append(weakref.ref(data))
        value = loss(model(torch.from_numpy(data)), torch.arange(6) % 3)
        del data
    value.backward()
    assert [ref() is None for ref in alive] == [True, True, False]
    optimizer.step()
    assert alive[-1]() is None


def test_a_batch_is_free_after_an_automatic_step_though_the_loss_lives() -> None:
    model, loss, _, _ = problem()
    optimizer = qd.Riemannian(model, loss)
    alive: list[weakref.ref[np.ndarray]] = []
    kept: list[Tensor] = []
    for _ in range(6):
        data = array()
        alive.append(weakref.ref(data))
        optimizer.zero_grad()
        kept.append(loss(model(torch.from_numpy(data)), torch.arange(6) % 3))
        del data
        kept[-1].backward()
        optimizer.step()
    assert [ref() for ref in alive] == [None] * 6
