"""Weight decay without an ``lr``: a part of the loss, with its slope and its curvature."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, linear_layers, mlp
from quasidiag.auto.penalty import Penalty, penalty
from quasidiag.auto.quadratic import QuadraticModel
from quasidiag.auto.replay import Replay
from quasidiag.auto.report import Report

N, INPUTS, OUTPUTS = 40, 5, 2


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, t = batch("gaussian", N, INPUTS, OUTPUTS, seed)
    return x, 3 * t + x[:, :OUTPUTS]


def step(optimizer: qd.Riemannian, x: Tensor, t: Tensor) -> None:
    optimizer.zero_grad()
    assert optimizer.criterion is not None
    optimizer.criterion(optimizer.model(x), t).backward()
    optimizer.step()


def objective(optimizer: qd.Riemannian, x: Tensor, t: Tensor, decay: float) -> float:
    assert optimizer.criterion is not None
    with torch.no_grad():
        size = sum(p.square().sum() for p in optimizer.model.parameters())
        return float(optimizer.criterion(optimizer.model(x), t) + decay / 2 * size)


class Bare(nn.Module):
    """A dense layer that nobody knows for one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(OUTPUTS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


# ------------------------------------------------ What it is


def test_value_slopes_and_forms_are_those_of_half_the_weighted_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (
        torch.randn(n, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (3, 4, 5)
    )
    u, v = ({p: torch.randn_like(p, requires_grad=False) for p in (a, b, c)} for _ in range(2))
    del v[b]
    found = Penalty({a: 0.3, b: 2.0})

    def value(x: Tensor, y: Tensor) -> Tensor:
        moved = {p: p.detach() + x * u[p] + y * v.get(p, 0 * p.detach()) for p in (a, b, c)}
        return 0.15 * moved[a].square().sum() + moved[b].square().sum()

    zero = torch.zeros((), dtype=torch.float64)
    slopes = torch.stack(torch.autograd.functional.jacobian(value, (zero, zero)))
    rows = torch.autograd.functional.hessian(value, (zero, zero))
    forms = torch.stack([torch.stack([*row]) for row in rows])
    assert found.now == pytest.approx(float(value(zero, zero)), rel=1e-12)
    there = {p: p.detach() + u[p] for p in (a, c)}
    along = 0.15 * there[a].square().sum() + b.detach().square().sum()
    assert found.value(there) == pytest.approx(float(along), rel=1e-12)
    torch.testing.assert_close(found.slopes([u, v]), slopes, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.forms([u, v]), forms, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:no block structure")
@pytest.mark.parametrize("bare", [False, True], ids=["layer", "bare"])
@pytest.mark.parametrize("decay", [0.0, 0.1, 10.0])
def test_the_step_promises_what_the_loss_with_it_does(bare: bool, decay: float) -> None:
    # Linear and Gaussian: the quadratic model is the loss itself.
    torch.manual_seed(0)
    model: nn.Module = Bare() if bare else mlp(INPUTS, OUTPUTS)
    optimizer = qd.Riemannian(
        model, qd.Gaussian().double(), weight_decay=decay, step_every=1, step_fraction=1.0
    )
    (x, t), (x2, t2) = data(), data(1)
    before, elsewhere = (objective(optimizer, *both, decay) for both in ((x, t), (x2, t2)))
    step(optimizer, x, t)
    assert optimizer.auto is not None
    change = objective(optimizer, x, t, decay) - before
    assert change < 0
    assert optimizer.auto.predicted == pytest.approx(change, rel=1e-9)
    change = objective(optimizer, x2, t2, decay) - elsewhere
    step(optimizer, x2, t2)
    assert optimizer.auto.actual == pytest.approx(change, rel=1e-9)
    assert abs(optimizer.auto.besides) < 1e-9  # and no other loss is suspected


def test_a_step_may_promise_what_both_can_fall_and_only_the_loss_is_grasped() -> None:
    model = QuadraticModel(cast(Replay, None), None, Report())
    slope, form = np.array([-4.0]), np.array([[1.0]])  # a parabola that falls by 8
    assert model._possible(slope, slope, form, 1.0, 3.0) == pytest.approx(0.5)
    assert model.report.grasp == pytest.approx(math.log(8.0))
    assert model._possible(slope, slope, form, 1.0, 9.0) == 1.0


# ------------------------------------------------ What comes of it


@pytest.mark.parametrize("decay", [0.01, 0.3, 10.0])
@pytest.mark.parametrize("bias", [None, 0.0, 1.0], ids=["all", "weights", "each its own"])
def test_ridge_regression(decay: float, bias: float | None) -> None:
    x, t = data()
    model = mlp(INPUTS, OUTPUTS)
    (layer,) = linear_layers(model)
    options: dict[str, Any] = {"weight_decay": decay}
    if bias is not None:
        options = {
            "params": [
                {"params": [layer.weight], "weight_decay": decay},
                {"params": [layer.bias], "weight_decay": bias},
            ]
        }
    optimizer = qd.Riemannian(model, qd.Gaussian().double(), **options)
    for _ in range(300):
        step(optimizer, x, t)
    ones = torch.cat([x, torch.ones(N, 1, dtype=x.dtype)], 1)
    ridge = torch.full((INPUTS + 1,), decay, dtype=x.dtype)
    ridge[-1] = decay if bias is None else bias
    best = torch.linalg.solve(ones.T @ ones / N + ridge.diag(), ones.T @ t / N)
    found = torch.cat([layer.weight.detach(), layer.bias.detach().unsqueeze(1)], 1).T
    assert (found - best).norm() < 0.02 * best.norm()


def test_standard_deviations_do_not_decay() -> None:
    x, t = data()
    model, criterion = mlp(INPUTS, OUTPUTS), qd.LearnedGaussian(OUTPUTS).double()
    optimizer = qd.Riemannian(model, criterion, weight_decay=1.0)
    for _ in range(300):
        step(optimizer, x, t)
    errors = (model(x) - t).detach().square().mean(0).sqrt()
    torch.testing.assert_close(criterion.std.detach(), errors, rtol=0.05, atol=0.0)


def test_what_else_does_not_decay() -> None:
    """What is frozen, and any parameter of the criterion."""

    class Warm(qd.Categorical):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return super().forward(output, target) + 0 * self.temperature

    x, t = batch("categorical", N, INPUTS, 3)
    model, criterion = mlp(INPUTS, 3), Warm()
    (layer,) = linear_layers(model)
    optimizer = qd.Riemannian(model, criterion, weight_decay=1.0)
    layer.bias.requires_grad_(False)
    bias = layer.bias.clone()
    for _ in range(10):
        step(optimizer, x, t)
    assert torch.equal(layer.bias, bias) and float(criterion.temperature) == 3.0
    assert {*penalty(optimizer).decays} == {layer.weight}


@pytest.mark.parametrize("options", [{}, {"safeguard": None}, {"reduction": "unitwise"}], ids=str)
def test_what_has_no_other_metric_decays(options: dict[str, Any]) -> None:
    x, t = batch("categorical", N, INPUTS, 3)
    x[:, 0] = 0.0
    model = mlp(INPUTS, 3)
    (layer,) = linear_layers(model)
    before = float(layer.weight[:, 0].detach().norm())
    optimizer = qd.Riemannian(model, qd.Categorical(), weight_decay=0.1, **options)
    for _ in range(100):
        step(optimizer, x, t)
    assert float(layer.weight[:, 0].detach().norm()) < 0.1 * before


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "unitwise"}, {"orthogonal": False}, {"safeguard": None}],
    ids=str,
)
def test_a_decay_that_hardly_counts_changes_little_below_a_layer_that_starts_at_zero(
    options: dict[str, Any],
) -> None:
    """Which has no metric yet: the gradient of its decay is no reason to go as far as others do."""

    def trained(decay: float) -> float:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(400, INPUTS, generator=generator, dtype=torch.float64)
        t = 100 * torch.sin(2 * x[:, :1])
        model = mlp(INPUTS, 20, 20, 1, activation="tanh")
        with torch.no_grad():
            for p in linear_layers(model)[-1].parameters():
                p.zero_()
        criterion = qd.Gaussian().double()
        optimizer = qd.Riemannian(
            model, criterion, weight_decay=decay, step_fraction=1.0, **options
        )
        for _ in range(60):
            step(optimizer, x, t)
        return objective(optimizer, x, t, decay)

    assert trained(1e-7) < 1.2 * trained(0.0)


def test_a_decay_that_begins_late_is_measured_at_once_and_earlier_steps_are_not_judged_by_it() -> (
    None
):
    optimizer = qd.Riemannian(mlp(INPUTS, 20, OUTPUTS, activation="tanh"), qd.Gaussian().double())
    for k in range(30):
        step(optimizer, *data(k))
    assert optimizer.auto is not None
    retreats = optimizer.auto.retreats
    optimizer.param_groups[0]["weight_decay"] = 10.0
    x, t = data(30)
    before = objective(optimizer, x, t, 10.0)
    step(optimizer, x, t)
    assert optimizer.auto.stride == 1 and optimizer.auto.retreats == retreats
    for k in range(31, 41):
        step(optimizer, *data(k))
    assert objective(optimizer, x, t, 10.0) < 0.5 * before
    optimizer.auto.stride = 2  # and one that goes on as it was is nothing new
    optimizer.param_groups[0]["weight_decay"] = 10.4
    step(optimizer, x, t)
    assert optimizer.auto.stride == 3


def test_rows_of_a_table_that_never_come_do_not_keep_the_others_back() -> None:
    def trained(rows: int) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(rows, 8), nn.Linear(8, 5)).double()
        optimizer = qd.Riemannian(model, qd.Categorical(), weight_decay=1e-3)
        for _ in range(60):
            x = torch.randint(10, (500,))
            step(optimizer, x, x % 5)
        return objective(optimizer, x, x % 5, 1e-3)

    assert trained(200) < 1.3 * trained(10)


def test_a_gradient_for_others_has_none_of_it() -> None:
    """They have a weight decay of their own."""
    x, t = data()
    found = []
    for decay in (0.0, 10.0):
        optimizer = qd.Riemannian(mlp(INPUTS, OUTPUTS), qd.Gaussian().double(), weight_decay=decay)
        for _ in range(2):  # the second time, as after a step
            optimizer.zero_grad()
            optimizer.criterion(optimizer.model(x), t).backward()  # type: ignore[misc]
            optimizer.precondition_()
        found.append([p.grad for p in optimizer.model.parameters()])
    for plain, decaying in zip(*found):
        torch.testing.assert_close(plain, decaying)


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_scheduler_that_has_lost_its_way(name: str, value: float) -> None:
    x, t = data()
    optimizer = qd.Riemannian(mlp(INPUTS, OUTPUTS), qd.Gaussian().double())
    step(optimizer, x, t)
    before = [p.detach().clone() for p in optimizer.model.parameters()]
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"{name} must be finite and not negative"):
        step(optimizer, x, t)
    optimizer.param_groups[0][name] = 1.0
    step(optimizer, x, t)
    assert all(p.isfinite().all() for p in optimizer.model.parameters())
    assert not all(torch.equal(p, q) for p, q in zip(before, optimizer.model.parameters()))


def test_it_may_change_on_the_way_and_goes_with_a_checkpoint() -> None:
    x, t = data()
    optimizer = qd.Riemannian(mlp(INPUTS, OUTPUTS), qd.Gaussian().double(), weight_decay=100.0)
    for _ in range(100):
        step(optimizer, x, t)
    small = float(linear_layers(optimizer.model)[0].weight.detach().norm())
    resumed = qd.Riemannian(mlp(INPUTS, OUTPUTS), qd.Gaussian().double())
    resumed.model.load_state_dict(optimizer.model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for rule in (optimizer, resumed):
        step(rule, x, t)
    for p, q in zip(optimizer.model.parameters(), resumed.model.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for _ in range(200):
        step(optimizer, x, t)
    assert float(linear_layers(optimizer.model)[0].weight.detach().norm()) > 3 * small


def test_a_network_of_its_own_precision() -> None:
    torch.manual_seed(0)
    x, t = (z.bfloat16() for z in data())
    model = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, OUTPUTS)).bfloat16()
    optimizer = qd.Riemannian(model, qd.Gaussian(), weight_decay=0.1)
    first = objective(optimizer, x, t, 0.1)
    for _ in range(30):
        step(optimizer, x, t)
    assert objective(optimizer, x, t, 0.1) < first


def test_the_metric_with_a_decaying_bias_does_not_depend_on_the_shift() -> None:
    """Oracle: the moments measured from zero, with the decay on the diagonal."""
    model, loss = mlp(4, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, weight_decay=0.01, safeguard=None)
    x, t = batch("categorical", 60, 4, 3)
    loss(model(x + 3), t).backward()
    optimizer.step()
    block = optimizer._blocks[0]
    assert optimizer.state[block.weight]["shift"].abs().min() > 1 and any(block.decays)
    gradients = [torch.ones_like(p) for p in block.parameters]
    found = []
    for _ in range(2):
        root = block.root([block], optimizer.state)
        u = root.gradient([g.unsqueeze(0) for g in gradients])
        found.append(torch.cat([x.flatten() for x in root.step(u)]))
        block._move(optimizer.state, -optimizer.state[block.weight]["shift"].clone())
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)
