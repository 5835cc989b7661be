"""``state_dict``: of this version, of a newer one, of somebody else."""

from __future__ import annotations

import io

import pytest
import torch
from loops import METRICS, assert_same, metric, problem, train, values

import quasidiag as qd
from nets import batch, mlp


@pytest.mark.parametrize("kind", METRICS)
def test_resumed_run_is_the_uninterrupted_one(kind: str) -> None:
    options = dict(metric=kind, momentum=0.5, seed=7, lr=0.05)
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, **options)
    train(model, loss, optimizer, x, t, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, loss, optimizer, x, t, 3)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, loss, x, t = problem()
    other.load_state_dict(saved["model"])
    resumed = qd.Riemannian(other, loss, **options)
    resumed.load_state_dict(saved["optimizer"])
    train(other, loss, resumed, x, t, 3)
    assert_same(values(model), values(other), 0.0)
    assert_same(metric(optimizer), metric(resumed), 0.0)


def test_state_from_the_future() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    kept, before = {**optimizer.state_dict(), "version": 99}, metric(optimizer)
    with pytest.raises(ValueError, match="newer"):
        optimizer.load_state_dict(kept)
    assert_same(before, metric(optimizer), 0.0)


@pytest.mark.parametrize("lr", [0.05, None])
@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD, qd.AdaGrad]
)
def test_state_of_another_optimizer(kind: type[torch.optim.Optimizer], lr: float | None) -> None:
    model, loss, x, t = problem()
    other = kind(model.parameters())
    train(model, loss, other, x, t)
    optimizer = qd.Riemannian(model, loss, lr=lr)
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="not the state_dict"):
        optimizer.load_state_dict({"model": 1})
    assert not optimizer.state


@pytest.mark.parametrize("lr", [0.05, None])
def test_state_of_another_model(lr: float | None) -> None:
    states = []
    for hidden in (6, 7):
        model, loss = mlp(4, hidden, 3), qd.Categorical()
        x, t = batch("categorical", 12, 4, 3)
        optimizer = qd.Riemannian(model, loss, lr=lr)
        train(model, loss, optimizer, x, t)
        states.append(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"0\.weight is \(7, 4\), .* was \(6, 4\)"):
        optimizer.load_state_dict(states[0])


def test_loading_drops_what_was_accumulating() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDNat(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    kept = optimizer.state_dict()
    loss(model(100 * x), t).backward()
    optimizer.load_state_dict(kept)
    assert not optimizer._collector.records
    assert optimizer._collector.total == 0


def test_the_generator_of_another_device_is_left_where_it_was() -> None:
    """A CUDA generator's state has 16 bytes, a CPU's thousands: draws then start anew from the seed."""
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    train(model, loss, optimizer, x, t, 3)
    kept = {**optimizer.state_dict(), "generator": torch.zeros(16, dtype=torch.uint8)}
    ends = []
    for state in (kept, {**kept, "generator": None}):
        twin, loss, x, t = problem()
        twin.load_state_dict(model.state_dict())
        fresh = qd.Riemannian(twin, loss)
        fresh.load_state_dict(state)
        train(twin, loss, fresh, x, t, 9)
        ends.append(values(twin))
    assert_same(*ends, tolerance=0.0)
