"""No step promises more than the loss has to give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import linear_layers, mlp
from quasidiag.auto.quadratic import QuadraticModel
from quasidiag.auto.report import Report

pytestmark = pytest.mark.usefixtures("unbounded", "full", "warm", "untried")


#: So that a layer without a say for most samples still moves far.
SMALL = (0.1, 0.01, 0.1)


def confident(criterion: qd.OutputModel, wrong: bool) -> tuple[qd.Riemannian, Tensor, Tensor]:
    """A network that is sure of what it says, of four inputs, and in one of 40 samples wrong or not."""
    model = mlp(4, 5, 3, activation="tanh")
    with torch.no_grad():
        linear_layers(model)[-1].weight.mul_(1000)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    said = model(x).detach()
    if isinstance(criterion, qd.Categorical):
        t = said.argmax(1)
        if wrong:
            t[0] = said[0].argmin()
        return qd.Riemannian(model, criterion, step_every=1, safeguard=SMALL), x, t
    t = (said > 0).double()
    if wrong:
        t[0] = 1 - t[0]
    return qd.Riemannian(model, criterion, step_every=1, safeguard=SMALL), x, t


def one_step(optimizer: qd.Riemannian, x: Tensor, t: Tensor, besides: float = 0.0) -> float:
    assert optimizer.criterion is not None
    optimizer.zero_grad()
    loss = optimizer.criterion(optimizer.model(x), t)
    weights = [y.weight for y in linear_layers(optimizer.model)]
    (loss + besides * torch.stack([w.square().sum() for w in weights]).sum()).backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("criterion", [qd.Categorical(), qd.Bernoulli()])
def test_a_saturated_output_promises_no_more_than_its_loss(criterion: qd.OutputModel) -> None:
    """Confident and wrong, it has a slope and next to no curvature."""
    optimizer, x, t = confident(criterion, wrong=True)
    report = optimizer.auto
    assert report is not None
    loss = one_step(optimizer, x, t)
    assert report.unbounded > 1.2 * loss
    assert report.promise == pytest.approx(loss)
    # The parabola with this slope at zero and its minimum at the least value.
    slope, far = report.slopes["new"], -report.coefficients["new"]
    assert slope * far / 2 == pytest.approx(loss)
    assert report.curvature * report.length == pytest.approx(2 * loss, rel=1e-4)


class Shifted(qd.Categorical):
    """Whose values begin at another one."""

    least = -5.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) + self.least


@pytest.mark.parametrize("criterion", [qd.Categorical(), Shifted()])
@pytest.mark.parametrize(("factor", "times"), [(0.1, 1), (10.0, 1), (0.5, 2)])
def test_weighted_losses_have_as_much_to_give(
    criterion: qd.OutputModel, factor: float, times: int
) -> None:
    optimizer, x, t = confident(criterion, wrong=True)
    report = optimizer.auto
    assert report is not None
    with torch.no_grad():
        room = float(criterion(optimizer.model(x), t)) - criterion.least
    for _ in range(times):
        (factor * criterion(optimizer.model(x), t)).backward()
    optimizer.step()
    assert report.promise == pytest.approx(factor * times * room) and report.unbounded > room


def test_what_is_usual_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a first step that is bounded would keep all that follow short."""
    usual = []
    for least in (0.0, -math.inf):
        monkeypatch.setattr(qd.Categorical, "least", least)
        optimizer, x, t = confident(qd.Categorical(), wrong=True)
        one_step(optimizer, x, t)
        assert optimizer.auto is not None
        usual.append(optimizer.auto.usual)
    assert usual[0] == pytest.approx(usual[1]) and optimizer.auto.curvature == usual[1]


def test_a_classifier_that_was_sure_learns_on() -> None:
    optimizer, x, t = confident(qd.Categorical(), wrong=True)
    losses = [one_step(optimizer, x, t) for _ in range(60)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("room", "own", "before", "part"),
    [
        (2.0, -4.0, 0.0, 0.25),
        (9.0, -4.0, 0.0, 1.0),
        (0.0, -4.0, 0.0, 1.0),
        (math.inf, -4.0, 0.0, 1.0),
        (2.0, -1.0, 0.0, 0.25),
        (2.0, -1.0, 1.0, 0.375),
        (1.0, -1.0, 9.0, 0.875),
        (2.0, -5.0, -3.0, 0.25),
    ],
)
def test_what_is_left_of_a_step(room: float, own: float, before: float, part: float) -> None:
    """One that promises eight; a loss at its least has nothing to give, and what it has no slope for is another's."""
    model = QuadraticModel.__new__(QuadraticModel)
    model.report = Report(besides=before)
    slope, form = (np.array(x) for x in ([-4.0], [[1.0]]))
    assert model._possible(slope, slope * own / -4, form, room) == pytest.approx(part, rel=1e-5)
    besides = before if math.isinf(room) else 8.0 + 2.0 * own
    assert model.report.besides == pytest.approx(besides, abs=1e-4)


def test_what_is_possible_is_not_bounded() -> None:
    optimizer, x, _ = confident(qd.Categorical(), wrong=False)
    with torch.no_grad():
        linear_layers(optimizer.model)[-1].weight.div_(1000)
    t = torch.randint(3, (40,), generator=torch.Generator().manual_seed(0))
    report = optimizer.auto
    assert report is not None
    loss = one_step(optimizer, x, t)
    assert report.promise == pytest.approx(report.unbounded) and 0 < report.promise < loss


def test_a_loss_besides_the_criterion_is_bounded_but_once() -> None:
    """A penalty, of which the criterion's value and its slope know nothing: where it is so twice in a row, it is there."""
    optimizer, x, t = confident(qd.Categorical(), wrong=False)
    report = optimizer.auto
    assert report is not None
    loss = one_step(optimizer, x, t, besides=1.0)
    assert report.promise == pytest.approx(loss) and report.unbounded > 10 * loss
    loss = one_step(optimizer, x, t, besides=1.0)
    assert report.promise > max(0.9 * report.unbounded, 10 * loss)


def test_normal_outputs_have_no_least_value() -> None:
    """Nor do they need one: their parabola is the loss itself, in the outputs."""
    assert qd.Gaussian().least == qd.LearnedGaussian(3).least == -math.inf
    optimizer = qd.Riemannian(nn.Linear(4, 3).double(), qd.Gaussian(), step_fraction=1.0)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    t = torch.randn(40, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    report = optimizer.auto
    assert report is not None
    loss = one_step(optimizer, x, t)
    constant = 3 * math.log(2 * math.pi) / 2
    assert 0.0 < report.promise < loss - constant
    assert report.unbounded == pytest.approx(report.promise)
