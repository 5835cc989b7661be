"""Training that begins where the metric is next to nothing, so that the first measured curvature is immense."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from handwritten import digits, network, train

import quasidiag as qd
from quasidiag.auto.parabola import minimiser
from quasidiag.auto.quadratic import BOUNDS, QuadraticModel
from quasidiag.auto.report import Report


def test_huge_inputs_are_trained_on() -> None:
    x, t = digits()
    losses = train(qd.Riemannian(network(3), qd.Categorical()), 3e4 * x, t, 150)
    assert sum(losses[-10:]) / 10 < 10.0


@pytest.mark.parametrize("times", [10, 30, 100])
def test_a_confident_network_learns_other_labels(times: int) -> None:
    """Draws from its own distribution are then what it predicts, and have no derivatives."""
    (x, t), model = digits(), network()
    train(qd.Riemannian(model, qd.Categorical()), x, t, 100)
    with torch.no_grad():
        for p in model[2].parameters():
            p.mul_(times)
    assert qd.Categorical()(model(x), (t + 3) % 10) > 50
    losses = train(qd.Riemannian(model, qd.Categorical()), x, (t + 3) % 10, 150)
    assert sum(losses[-10:]) / 10 < 1.0


@pytest.mark.parametrize(
    ("measured", "usual"),
    [
        ((1e19, 448.0, 26.0), 448.0 / BOUNDS[0]),
        ((1e19, 448.0), 5e18),  # one alone may be an outlier
        ((1e3, 1e-9, 1e-9), 1 / BOUNDS[0]),  # an output that is saturated has next to none
        ((1.0, 2.0, 3.0), 2.0),
    ],
)
def test_the_usual_curvature_comes_down_with_the_last_two(
    measured: tuple[float, ...], usual: float
) -> None:
    report = Report()
    model = QuadraticModel(None, None, report)  # type: ignore[arg-type]
    for curvature in measured:
        report.damping = 10 * report.usual
        model._expect(-1.0, curvature, 1.0)
        report.steps += 1
    assert report.usual == pytest.approx(usual) and report.bare == measured[-1]
    assert report.damping <= 20 * report.usual  # it has come down alike


def test_a_direction_without_curvature_is_not_followed() -> None:
    """Along it the model has no minimum."""
    flat = np.array([[0.0]])
    assert minimiser(np.array([-1e-22]), flat) == 0.0
    both = minimiser(np.array([-1.0, -1e-22]), np.diag([2.0, 0.0]))
    assert both[0] == pytest.approx(0.5, rel=1e-5) and both[1] == 0.0
