"""The coefficients of ``step="auto"`` against the minimiser of the model with dense matrices, float64."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import OUTPUTS, STD, batch, criterion, linear_layers, mlp
from quasidiag.auto.parabola import Parabola, minimiser
from quasidiag.auto.proposal import reach
from quasidiag.auto.quadratic import BOUNDS, DECAY, FORMS, MORE, SHORTEST, QuadraticModel
from quasidiag.auto.replay import Replay
from quasidiag.auto.report import RISES, WARM_UP, Report
from quasidiag.reductions import safeguarded
from quasidiag.reference import completion

pytestmark = pytest.mark.usefixtures("unbounded", "warm", "full", "untried")
SIZES = (5, 6, 3)
SAFEGUARDS: dict[str, Any] = {"safeguards": "default", "none": None}


def flat(tensors: Any) -> Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def dense_fisher(output: str, model: nn.Module, x: Tensor) -> Tensor:
    if output == "categorical":
        return qd.reference.fisher_categorical(model, x)
    if output == "gaussian":
        return qd.reference.fisher_gaussian(model, x, STD)
    return qd.reference.fisher_bernoulli(model, x)


def dense_metric(optimizer: qd.Riemannian) -> Tensor:
    """The completion of every unit's block in the order of ``model.parameters()``.

    The moments are those of a - c, so M = B M̃ Bᵀ with B = [[1, 0], [c, 1]].
    """
    model = optimizer.model
    total = sum(p.numel() for p in model.parameters())
    dense, start = torch.zeros(total, total, dtype=torch.float64), 0
    for layer in linear_layers(model):
        kept = optimizer.state[layer.weight]
        m00, m0i, mii = optimizer.state[layer.bias]["m00"], kept["m0i"], kept["mii"]
        if optimizer.safeguard is not None:
            m00, mii = safeguarded(m00, m0i, mii, *optimizer.safeguard)
        units, inputs = layer.weight.shape
        back = torch.eye(1 + inputs, dtype=torch.float64)
        back[1:, 0] = kept["shift"]
        for unit in range(units):
            diagonal = torch.cat([m00[unit : unit + 1], mii[unit]])
            block = back @ completion(diagonal, m0i[unit]) @ back.T
            weights = start + unit * inputs + torch.arange(inputs)
            places = torch.cat([torch.tensor([start + units * inputs + unit]), weights])
            dense[places.unsqueeze(1), places] = block
        start += units * (inputs + 1)
    return dense


@pytest.mark.parametrize("bounds", list(SAFEGUARDS))
@pytest.mark.parametrize("metric", ["outer-product", "exact"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_coefficients_minimise_the_dense_quadratic_model(
    output: str, metric: str, bounds: str
) -> None:
    model, loss = mlp(*SIZES, activation="tanh"), criterion(output)
    safeguard = SAFEGUARDS[bounds]
    optimizer = qd.Riemannian(
        model, loss, metric=metric, metric_every=1, safeguard=safeguard, orthogonal=False
    )
    assert optimizer.auto is not None
    average, seen, form = torch.zeros(()), 0.0, 0.0
    for step in range(4):
        keep, new = FORMS if step else 0.0, 1 / reach(step)
        x, t = batch(output, 40, SIZES[0], SIZES[-1])
        fisher = dense_fisher(output, model, x)
        before = flat(model.parameters())
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        taken = flat(model.parameters()) - before
        metric_ = dense_metric(optimizer)
        g = flat(p.grad for p in model.parameters())
        average, seen = (1 - new) * average + new * g, (1 - new) * seen + new
        whole = (1 - new) * seen + new
        d = torch.linalg.solve(metric_, (1 - new) * average + new * g) / whole
        report, length = optimizer.auto, d @ metric_ @ d
        fresh = float(d @ fisher @ d / length)
        form = keep * min(form, MORE * fresh) + (1 - keep) * fresh
        best = float(g @ d / (length * (form + report.damping)))
        assert report.alpha == pytest.approx(best, rel=1e-5)
        torch.testing.assert_close(taken, -report.alpha * d, rtol=1e-6, atol=1e-9)
        predicted = g @ taken + 0.5 * report.alpha**2 * form * length
        torch.testing.assert_close(report.predicted, float(predicted), rtol=1e-6, atol=1e-12)
        length = float(taken @ metric_ @ taken)
        torch.testing.assert_close(report.length, length, rtol=1e-6, atol=1e-12)


def test_actual_decrease_is_that_of_samples_the_step_has_not_seen() -> None:
    model, loss = mlp(*SIZES), criterion("categorical")
    optimizer = qd.Riemannian(model, loss, lr=0.1, step="auto", step_every=1)
    report = optimizer.auto
    assert report is not None
    last: dict[Tensor, Tensor] = {}
    trend = usual = 0.0
    for step in range(8):
        x, t = batch("categorical", 40, SIZES[0], SIZES[-1], seed=step)
        optimizer.zero_grad()
        now = loss(model(x), t)
        now.backward()
        if step:
            with torch.no_grad():
                for p, u in last.items():
                    p.sub_(u)
                then = loss(model(x), t)
                for p, u in last.items():
                    p.add_(u)
        predicted, damping = report.predicted, report.damping
        optimizer.step()
        last = {p: optimizer.state[p]["update"].clone() for p in model.parameters()}
        if step:
            assert report.actual == pytest.approx(float((now - then).detach()))
            assert report.ratio == pytest.approx(report.actual / predicted)
            trend = 0.98 * trend + report.actual
            assert report.trend == pytest.approx(trend)
            change = RISES[1] if trend > 0 else DECAY  # nothing was heard yet
            assert report.damping == pytest.approx(max(damping * change, 0.01 * usual))
        usual = report.usual
    assert report.retreats == 0


def test_the_damping_rises_with_the_loss() -> None:
    """A rise over several steps, none of which is bad enough to be taken back."""
    model, loss = mlp(*SIZES), criterion("categorical")
    optimizer = qd.Riemannian(model, loss)
    report = optimizer.auto
    assert report is not None
    x, t = batch("categorical", 40, SIZES[0], SIZES[-1])
    for step in range(3):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        damping, usual = report.damping, report.usual
        report.promise, report.hope = 1e3, math.log(1e3)
        if step:  # as if it had been the other way round
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(2 * optimizer.state[p]["update"])
                    optimizer.state[p]["update"].neg_()
            optimizer.zero_grad()
            loss(model(x), t).backward()
        optimizer.step()
    assert report.actual > 0 and report.retreats == 0
    assert report.damping == pytest.approx(max(damping * RISES[1], 0.01 * usual))


def test_a_step_that_did_harm_is_taken_back() -> None:
    model, loss = mlp(*SIZES), criterion("categorical")
    optimizer = qd.Riemannian(model, loss)
    report = optimizer.auto
    assert report is not None
    x, t = batch("categorical", 40, SIZES[0], SIZES[-1])
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        good = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            push = torch.full_like(p, 1e3)
            p.add_(push)
            optimizer.state[p]["update"].add_(push)
    before = copy.copy(report)
    metric = optimizer.moments(model[0]).mii.clone()
    optimizer.zero_grad()
    loss(model(x), t).backward()
    optimizer.step()
    part = before.promise / (report.actual + 2 * before.promise)
    assert 0 < part < 1 and report.retreats == 1
    longer = (before.curvature + before.damping) / max(part, SHORTEST) - before.curvature
    assert report.damping == pytest.approx(min(longer, BOUNDS[3] * before.usual))
    torch.testing.assert_close(optimizer.moments(model[0]).mii, metric, rtol=0, atol=0)
    torch.testing.assert_close([p.detach() for p in model.parameters()], good, rtol=1e-9, atol=1e-9)
    optimizer.zero_grad()
    loss(model(x), t).backward()
    optimizer.step()
    assert report.retreats == 1


def test_a_promise_beyond_the_usual_excuses_no_harm() -> None:
    """A minibatch with an outlier promises much, and the next one does not have it."""
    model, loss = mlp(*SIZES), criterion("categorical")
    optimizer = qd.Riemannian(model, loss, lr=0.1, step="auto")
    report = optimizer.auto
    assert report is not None
    logarithms = []
    for seed in range(4):
        x, t = batch("categorical", 40, SIZES[0], SIZES[-1], seed=seed)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        logarithms.append(math.log(report.promise))
    assert report.retreats == 0
    assert report.hope == pytest.approx(sum(logarithms) / 4)
    judge = optimizer._model
    assert judge is not None
    x, t = batch("categorical", 40, SIZES[0], SIZES[-1], seed=4)
    optimizer.zero_grad()
    loss(model(x), t).backward()
    back = {p: -optimizer.state[p]["update"] for p in model.parameters()}
    judge.judge(back)  # as if it had been the other way round
    rise = report.actual
    assert rise > 0
    for promise, hope, harm in (
        (1e9, 1.1 * rise, False),
        (1e9, 0.9 * rise, True),
        (1.1 * rise, 1e9, False),
        (0.9 * rise, 1e9, True),
    ):
        report.promise, report.hope = promise, math.log(hope)
        assert judge.judge(back) == harm


def test_learned_deviations_take_a_part_of_their_natural_step() -> None:
    """The Fisher information of ln σ is 2, and nothing lies between the network and σ."""
    model, loss = mlp(*SIZES), qd.LearnedGaussian(SIZES[-1]).double()
    optimizer = qd.Riemannian(model, loss)
    assert optimizer.auto is not None
    for step in range(3):
        x, t = batch("gaussian", 40, SIZES[0], SIZES[-1], seed=step)
        parameters = [*model.parameters(), loss.log_std]
        n = sum(p.numel() for p in parameters)
        fisher = torch.zeros(n, n, dtype=torch.float64)
        fisher[:-3, :-3] = qd.reference.fisher_gaussian(model, x, loss.std.detach())
        fisher[-3:, -3:] = 2 * torch.eye(3, dtype=torch.float64)
        before = flat(parameters)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        taken = flat(parameters) - before
        g = flat(p.grad for p in parameters)
        damped = optimizer.auto.curvature / (optimizer.auto.curvature + optimizer.auto.damping)
        assert 0.9 < damped < (1 if step else 1.01)
        optimizer.auto.forms = {}  # no average with those of this step
        part = damped * min(2 / (step + 3), 0.5)  # an average over all minibatches so far
        natural = -part * g[-3:] / 2
        variances = (2 * before[-3:]).exp()
        moved = (2 * (before + taken)[-3:]).exp() - variances
        torch.testing.assert_close(moved, 2 * natural * variances)  # (1 - a) σ² + a e²
        taken[-3:] = natural  # what the model speaks of
        predicted = g @ taken + 0.5 * taken @ fisher @ taken
        torch.testing.assert_close(optimizer.auto.predicted, float(predicted))
        assert optimizer.auto.own == pytest.approx(part)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_learned_deviations_find_targets_of_any_scale(scale: float) -> None:
    """The first step is half-way to an average of errors, whose squares may be as large as they like."""
    model, loss = mlp(*SIZES), qd.LearnedGaussian(SIZES[-1], min_std=1e-6).double()
    optimizer = qd.Riemannian(model, loss)
    for step in range(60):
        x, t = batch("gaussian", 40, SIZES[0], SIZES[-1], seed=step)
        optimizer.zero_grad()
        loss(model(x), scale * t).backward()
        optimizer.step()
    errors = (scale * t - model(x)).detach().std(0)
    assert bool(((loss.std / errors).log().abs() < 1).all())


@pytest.mark.parametrize("slow", ["network", "deviations"])
def test_a_group_that_is_a_direction_of_its_own_has_its_own_factor(slow: str) -> None:
    found = []
    for lr in (1.0, 0.01):
        model, loss = mlp(*SIZES), qd.LearnedGaussian(SIZES[-1]).double()
        groups = [
            {"params": [*model.parameters()], "lr": lr if slow == "network" else 1.0},
            {"params": [loss.log_std], "lr": lr if slow == "deviations" else 1.0},
        ]
        optimizer = qd.Riemannian(model, loss, step="auto", params=groups)
        before = flat([*model.parameters()]), flat([loss.log_std])
        x, t = batch("gaussian", 40, SIZES[0], SIZES[-1])
        loss(model(x), t).backward()
        optimizer.step()
        variances = (2 * flat([loss.log_std])).exp() - (2 * before[1]).exp()
        found.append((flat(model.parameters()) - before[0], variances))
    (whole, own), (less, other) = found
    part = (0.01, 1.0) if slow == "network" else (1.0, 0.01)
    torch.testing.assert_close(less, part[0] * whole)
    torch.testing.assert_close(other, part[1] * own)


def test_deviations_are_learned_with_a_frozen_network() -> None:
    model, loss = mlp(*SIZES), qd.LearnedGaussian(SIZES[-1]).double()
    optimizer = qd.Riemannian(model, loss)
    x, t = batch("gaussian", 40, SIZES[0], SIZES[-1])
    for step in range(200):
        model.requires_grad_(step < 6)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    errors = (model(x) - t).detach().square().mean(0).sqrt()
    torch.testing.assert_close(loss.std.detach(), errors, rtol=0.05, atol=0.0)


def test_ignored_targets_do_not_count() -> None:
    x, t = batch("categorical", 40, SIZES[0], SIZES[-1])
    mixed = t.clone()
    mixed[::2] = -100
    found = []
    for inputs, targets in ((x, mixed), (x[1::2], t[1::2])):
        model, loss = mlp(*SIZES), qd.Categorical()
        optimizer = qd.Riemannian(model, loss, metric="exact", safeguard=None)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
        found.append(flat(model.parameters()))
    torch.testing.assert_close(*found)


def test_an_average_of_forms_counts_for_a_few_times_the_new_ones_at_most() -> None:
    """A sharp place that was left behind would else shorten dozens of steps."""
    model = QuadraticModel(cast(Replay, None), None, Report())
    one, names = np.ones(2), ["new", "other"]
    sharp, flat = np.array([[900.0, 90.0], [90.0, 100.0]]), np.array([[1.0, 0.2], [0.2, 3.0]])
    np.testing.assert_allclose(model._averaged(names, sharp, one), sharp)
    expected = FORMS * (MORE * 4 / 1000) * sharp + (1 - FORMS) * flat
    np.testing.assert_allclose(model._averaged(names, flat, one), expected)
    then = FORMS * expected + (1 - FORMS) * sharp
    np.testing.assert_allclose(model._averaged(names, sharp, one), then)
    model.report.steps = WARM_UP  # later, single measurements differ as much by noise
    expected = FORMS * then + (1 - FORMS) * flat
    np.testing.assert_allclose(model._averaged(names, flat, one), expected)


def test_what_has_no_metric_gets_a_coefficient_of_its_own() -> None:
    """Its direction is a diagonal rule's, of another scale; parameters without a gradient stay."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(*SIZES)
            self.temperature = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * (1 + 1e3 * self.temperature[0])

    model, loss = Scaled(), qd.Categorical()
    with pytest.warns(UserWarning, match="diagonal rule"):
        optimizer = qd.Riemannian(model, loss)
    plain_model = mlp(*SIZES)
    plain = qd.Riemannian(plain_model, loss)
    x, t = batch("categorical", 40, SIZES[0], SIZES[-1])
    for net, rule in ((model, optimizer), (plain_model, plain)):
        for _ in range(30):
            rule.zero_grad()
            loss(net(x), t).backward()
            rule.step()
    assert optimizer.auto is not None and plain.auto is not None
    assert optimizer.auto.other not in (0.0, optimizer.auto.alpha)
    assert model.temperature[0] != 0 and model.temperature[1] == 0
    assert float(loss(model(x), t)) < 0.6 > float(loss(plain_model(x), t))


def test_directions_that_coincide_have_a_solution() -> None:
    linear, singular = np.ones(2), np.ones((2, 2))
    assert minimiser(linear, singular).sum() == pytest.approx(-1, rel=1e-5)
    assert not minimiser(linear, np.full((2, 2), np.nan)).any()
    best = minimiser(np.array([1.0, 0.0]), np.diag([2.0, 0.0]))
    assert best == pytest.approx([-0.5, 0.0], rel=1e-5)


@pytest.mark.parametrize("form", [2.0, 1e-300, 0.0])
def test_a_single_direction_is_followed_as_far_as_beside_another(form: float) -> None:
    with np.errstate(all="ignore"):
        both = minimiser(np.array([-3.0, 0.0]), np.diag([form, 1.0]))
        alone = minimiser(np.array([-3.0]), np.array([[form]]))
    assert alone == pytest.approx(both[:1], rel=1e-12)


@pytest.mark.parametrize("at", [0, 5])
def test_a_form_that_is_not_finite_is_forgotten(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of half precision: it would stay in the average, and no step would have a length any more."""
    model, loss = mlp(4, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, step_every=1)
    assert optimizer.auto is not None
    x, t = batch("categorical", 40, 4, 3)
    form = QuadraticModel._form
    for k in range(9):
        spoilt = math.nan if k == at else 1.0
        monkeypatch.setattr(
            QuadraticModel, "_form", lambda *args, f=spoilt: tuple(f * x for x in form(*args))
        )
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        assert (optimizer.auto.alpha > 0) == (k > 0 or at > 0)
        assert all(map(math.isfinite, optimizer.auto.forms.values()))


def test_no_direction_is_followed_uphill() -> None:
    """Where two do about the same to the outputs, the minimum may lie behind one of them: the other goes alone."""
    slopes, curved = np.array([4.0, 1.0]), np.array([[4.0, 3.8], [3.8, 4.0]])
    parabola = Parabola(slopes, curved, np.zeros((2, 2)), np.ones(2))
    assert minimiser(slopes, curved)[1] > 0
    assert parabola.best == pytest.approx([-1.0, 0.0], rel=1e-5)
