"""Longer steps where crossing the valley costs next to nothing, because the average at rest makes up for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import OUTPUTS, batch, criterion, mlp
from quasidiag.auto import bounce, rest
from quasidiag.auto.bounce import GROWTH, LATER, NEW, SMALL, TWICE, lengthen
from quasidiag.auto.quadratic import BOUNDS, LESS, QuadraticModel
from quasidiag.auto.report import Report


def step(model: nn.Module, loss: nn.Module, optimizer: qd.Riemannian, x: Tensor, t: Tensor) -> None:
    optimizer.zero_grad()
    loss(model(x), t).backward()
    optimizer.step()


def late(
    loss: qd.OutputModel, steps: int = LATER, echo: float = -1.0, **options: Any
) -> tuple[nn.Module, qd.Riemannian, Report]:
    """As if so many steps had been taken, after the last of which minibatches agree on their curvature or do not."""
    model = mlp(5, 6, 3)
    optimizer = qd.Riemannian(model, loss, step_every=1, **options)
    report = optimizer.auto
    assert report is not None
    report.steps, report.echo = steps, echo
    return model, optimizer, report


def test_steps_get_longer_while_there_is_none_and_shorter_where_it_is_large() -> None:
    report = Report()
    grown = []
    for _ in range(6):
        lengthen(report, 0.0)
        grown.append(report.longer)
    assert grown == pytest.approx([min(GROWTH * (k + 1), math.log(TWICE)) for k in range(6)])
    for _ in range(99):
        lengthen(report, SMALL)
    assert report.longer == pytest.approx(math.log(TWICE)) and report.bounces == 105
    for _ in range(99):
        lengthen(report, 1.0)
    assert report.longer == 0.0
    report = Report()
    for k, found in enumerate((0.1, 0.3, -0.2, 0.0, 0.5, 0.1)):
        average = report.bounce
        lengthen(report, found)
        weight = max(NEW, 1 / (k + 1))
        assert report.bounce == pytest.approx((1 - weight) * average + weight * found)


def test_it_is_the_loss_where_training_is_against_that_at_rest() -> None:
    model, optimizer, report = late(loss := qd.Gaussian(0.5))
    for seed in range(6):
        x, t = batch("gaussian", 500, 5, 3, seed=seed)
        step(model, loss, optimizer, x, t)
        report.echo = -1.0
    asked, average = report.bounces, report.bounce
    with torch.no_grad():
        there = float(loss(model(x), t))
        rest.lead_(optimizer)
        now = float(loss(model(x), t))
        rest.settle_(optimizer)
    step(model, loss, optimizer, x, t)
    found = (now - there) / (there - float(loss(t, t)))
    assert asked > 0 and report.bounces == asked + 1
    weight = max(NEW, 1 / report.bounces)
    assert report.bounce == pytest.approx(average + weight * (found - average), rel=1e-6)


@pytest.mark.parametrize(
    "unlike",
    [
        dict(steps=LATER - 8),
        dict(echo=-0.2),
        dict(averaged=False),
        dict(loss=qd.LearnedGaussian(3).double()),
    ],
)
def test_it_is_not_asked_for_elsewhere(unlike: dict[str, Any]) -> None:
    """Early, where minibatches may each have their own curvature, without an average, or for a loss without a bottom."""
    for options, asked in (({}, True), (unlike, False)):
        given = {"loss": qd.Gaussian(), **options}
        model, optimizer, report = late(**given)
        echo = report.echo
        for seed in range(6):
            x, t = batch("gaussian", 500, 5, 3, seed=seed)
            step(model, given["loss"], optimizer, x, t)
            report.echo = echo
        assert (report.bounces > 0) == asked and (report.longer > 0) <= asked


@pytest.mark.parametrize("lr", [0.5, 1.0, 1.5, 3.0])
def test_steps_are_that_much_longer(lr: float) -> None:
    model, optimizer, report = late(loss := qd.Gaussian(), steps=10**6, lr=lr, step="auto")
    x, t = batch("gaussian", 500, 5, 3)
    for longer, echo, factor in ((0.0, -1.0, 1.0), (math.log(1.7), -1.0, 1.7), (0.5, 0.0, 1.0)):
        report.longer, report.echo, report.falls = longer, echo, []
        optimizer._model.replay.restart()
        step(model, loss, optimizer, x, t)
        assert report.factor == pytest.approx(max(lr, lr * factor / max(1.0, lr)), rel=1e-3)


def test_the_damping_is_bounded_by_less_where_steps_are_to_be_longer() -> None:
    for longer in (0.0, math.log(TWICE)):
        report = Report(usual=2.0, echo=-1.0, longer=longer)
        model = QuadraticModel.__new__(QuadraticModel)
        model.report = report
        model._damp(1e9, 0.0)
        assert report.damping == pytest.approx(2 * BOUNDS[1] * math.exp(-LESS * longer))


@pytest.mark.parametrize("kind", OUTPUTS)
def test_no_loss_is_less_than_its_least(kind: str) -> None:
    loss, (x, t) = criterion(kind), batch(kind, 30, 5, 3)
    output = mlp(5, 6, 3)(x).detach()
    least = loss.least_of(output)
    assert float(loss(output, t)) > least
    if kind == "gaussian":
        assert float(loss(t, t)) == pytest.approx(least)


def test_a_density_with_other_values_says_its_own_least() -> None:
    class Squares(qd.Gaussian):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - target).square().mean()

    class Bounded(Squares):
        least = 0.0

    found = [kind().least_of(torch.zeros(4, 2)) for kind in (qd.Gaussian, Squares, Bounded)]
    assert found == pytest.approx([math.log(2 * math.pi), -math.inf, 0.0])


def test_targets_without_noise_are_learned_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the valley is the same for all minibatches."""
    ends = []
    for most in (TWICE, 1.0):
        monkeypatch.setattr(bounce, "TWICE", most)
        torch.manual_seed(0)
        model, loss = mlp(2, 24, 24, 1, activation="tanh").float(), qd.Gaussian()
        optimizer = qd.Riemannian(model, loss)
        x = 2 * torch.rand(2000, 2) - 1
        t = torch.sin(4 * x[:, :1]) * torch.cos(3 * x[:, 1:])
        for _ in range(500):
            some = torch.randint(2000, (500,))
            step(model, loss, optimizer, x[some], t[some])
        ends.append(float((model.eval()(x) - t).detach().square().mean()))
    assert ends[0] < 0.7 * ends[1]
