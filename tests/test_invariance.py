"""Training does not depend on how inputs and activities are encoded: real digits, 100 steps, float64.

eps = floor = 0, since both break the invariance by as much as they matter. The inputs are the pixels that
are lit in at least a third of the digits, and some that never are: a pixel lit in a single sample of a
minibatch has hardly any metric without eps, and training on it is chaos, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import criterion, digits, mlp
from quasidiag import invariance

STEPS, BATCH, GAMMA = 100, 300, 0.05
METRICS = {"OP": "outer-product", "MC": "monte-carlo", "exact": "exact"}
AFFINE = ["inversion", "sigmoid to tanh", "affine"]
CONTROLS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "AdaGrad": lambda model: qd.AdaGrad(model.parameters(), lr=1e-3),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
}


@cache
def data() -> tuple[Tensor, Tensor]:
    x, t = digits()
    lit = (x > 0).double().mean(0)
    often, never = (lit > 1 / 3).nonzero().flatten(), (lit == 0).nonzero().flatten()
    assert len(often) > 150
    return x[:, torch.cat([often, never[:20]])].contiguous(), t


def train_twins(
    make: Callable[[nn.Module, nn.Module], torch.optim.Optimizer], change: str
) -> invariance.Drift:
    x, t = data()
    model = mlp(x.shape[1], 12, 10, 10)
    drift = invariance.measure(
        make,
        model,
        criterion("categorical"),
        invariance.CHANGES[change](model),
        x,
        t,
        steps=STEPS,
        batch_size=BATCH,
    )
    assert drift.moved > 0.5, "no training happened"
    return drift


def riemannian(
    metric: str, reduction: str, momentum: float = 0.0
) -> Callable[[nn.Module, nn.Module], torch.optim.Optimizer]:
    return lambda model, loss: qd.Riemannian(
        model,
        loss,
        lr=1e-3 * (1 - momentum / 2),
        metric=METRICS[metric],
        reduction=reduction,
        gamma=GAMMA,
        momentum=momentum,
        eps=0.0,
        floor=0.0,
        seed=0,
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("metric", list(METRICS))
@pytest.mark.parametrize("change", AFFINE)
def test_quasi_diagonal_training_is_invariant(change: str, metric: str, momentum: float) -> None:
    drift = train_twins(riemannian(metric, "quasi-diagonal", momentum), change)
    assert drift.worst < 1e-7
    assert drift.losses[-1] < drift.losses[0]


@pytest.mark.parametrize("metric", list(METRICS))
def test_diagonal_training_is_invariant_under_rescaling(metric: str) -> None:
    assert train_twins(riemannian(metric, "diagonal"), "rescaling").worst < 1e-7


@pytest.mark.parametrize("change", AFFINE)
def test_diagonal_training_is_not_invariant_under_offsets(change: str) -> None:
    assert train_twins(riemannian("OP", "diagonal"), change).worst > 1e-2


@pytest.mark.parametrize("change", [*AFFINE, "rescaling"])
@pytest.mark.parametrize("control", list(CONTROLS))
def test_controls_drift_by_orders_of_magnitude_more(control: str, change: str) -> None:
    drift = train_twins(lambda model, loss: CONTROLS[control](model), change)
    assert drift.worst > 1e-2


@pytest.mark.parametrize("change", list(invariance.CHANGES))
def test_a_twin_is_the_same_function(change: str) -> None:
    x, _ = data()
    model = mlp(x.shape[1], 12, 10, 10)
    other = invariance.CHANGES[change](model)
    twin = invariance.twin(model, other)
    torch.testing.assert_close(twin(other.inputs(x)), model(x), rtol=1e-10, atol=1e-10)
    if change == "sigmoid to tanh":
        assert [type(m) for m in twin] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]


def test_measuring_leaves_the_model_alone() -> None:
    x, t = data()
    model = mlp(x.shape[1], 4, 10)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    drift = invariance.measure(
        lambda net, loss: qd.QDOP(net, loss, lr=1e-3),
        model,
        criterion("categorical"),
        invariance.inversion(model),
        x,
        t,
        steps=3,
    )
    assert len(drift.differences) == len(drift.moves) == len(drift.losses) == 3
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_has_no_twin_says_so() -> None:
    with pytest.raises(ValueError, match="alternates Linear"):
        invariance.inversion(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="bias"):
        invariance.random_affine(nn.Sequential(nn.Linear(3, 3, bias=False)))
    with pytest.raises(ValueError, match="sigmoid"):
        invariance.sigmoid_to_tanh(mlp(3, 3, 2, activation="relu"))
    with pytest.raises(ValueError, match="layers of activities"):
        invariance.twin(mlp(3, 3, 2), invariance.inversion(mlp(3, 3, 3, 2)))
