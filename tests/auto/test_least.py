"""No step promises more than the loss has to give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import linear_layers, mlp

pytestmark = pytest.mark.usefixtures("unbounded", "full", "warm")


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
        return qd.Riemannian(model, criterion, step_every=1), x, t
    t = (said > 0).double()
    if wrong:
        t[0] = 1 - t[0]
    return qd.Riemannian(model, criterion, step_every=1), x, t


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
    assert report.unbounded > 1.5 * loss
    assert report.promise == pytest.approx(loss)
    # The parabola with this slope at zero and its minimum at the least value.
    slope, far = report.slopes["new"], -report.coefficients["new"]
    assert slope * far / 2 == pytest.approx(loss)
    assert report.curvature * report.length == pytest.approx(2 * loss, rel=1e-4)


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
    """A penalty, of which the criterion's value knows nothing: what two steps in a row promise is there."""
    optimizer, x, t = confident(qd.Categorical(), wrong=False)
    report = optimizer.auto
    assert report is not None
    loss = one_step(optimizer, x, t, besides=1.0)
    assert report.promise == pytest.approx(loss) and report.unbounded > 10 * loss
    loss = one_step(optimizer, x, t, besides=1.0)
    assert report.promise == pytest.approx(report.unbounded) and report.promise > 10 * loss


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
    assert report.promise == pytest.approx(report.unbounded) and report.promise < loss - constant
