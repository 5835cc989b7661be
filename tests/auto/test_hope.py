"""What is usual: the averages that a step is judged by, from their first step on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto.quadratic import CHANGE, QuadraticModel
from quasidiag.auto.report import Report

pytestmark = pytest.mark.usefixtures("unbounded")


def expecting(report: Report, promise: float) -> None:
    model = QuadraticModel.__new__(QuadraticModel)
    model.report = report
    numbers = torch.tensor([-2 * promise, 3.0, 2.0], dtype=torch.float64)
    model._expect(*numbers)
    report.steps += 1


def problem(scale: float = 1.0) -> tuple[qd.Riemannian, Tensor, Tensor]:
    x, t = batch("gaussian", 24, 4, 3)
    return qd.Riemannian(mlp(4, 6, 3), qd.Gaussian()), x, scale * t


def one_step(optimizer: qd.Riemannian, x: Tensor, t: Tensor) -> None:
    assert optimizer.criterion is not None
    optimizer.zero_grad()
    optimizer.criterion(optimizer.model(x), t).backward()
    optimizer.step()


def test_averages_begin_with_the_first_step_that_there_is() -> None:
    """Not with a gradient of zero, nor with the zero of a warm-up."""
    optimizer, x, t = problem(scale=1e3)
    report = optimizer.auto
    assert report is not None
    one_step(optimizer, x, optimizer.model(x).detach())
    assert report.promise == 0.0 == report.usual
    optimizer.param_groups[0]["lr"] = 0.0
    one_step(optimizer, x, t)
    assert report.length == 0.0 == report.predicted
    assert report.hope == pytest.approx(math.log(report.promise))
    assert report.usual == report.curvature > 0


def test_the_factor_is_no_part_of_what_is_usual() -> None:
    whole, x, t = problem()
    half, _, _ = problem()
    half.param_groups[0]["lr"] = 0.5
    for optimizer in (whole, half):
        one_step(optimizer, x, t)
    assert whole.auto is not None and half.auto is not None
    for name in ("promise", "hope", "curvature", "usual"):
        assert getattr(half.auto, name) == pytest.approx(getattr(whole.auto, name))
    assert half.auto.length == pytest.approx(whole.auto.length / 4)


def test_other_data_are_no_outlier() -> None:
    """After convergence promises are tiny; one large one is an outlier's, two in a row are the new usual."""
    report = Report()
    for _ in range(100):
        expecting(report, 1e-9)
    expecting(report, 1.0)
    assert math.exp(report.hope) < 1e-8
    expecting(report, 1e-9)
    assert math.exp(report.hope) < 1e-8
    expecting(report, 2.0)
    expecting(report, 1.0)
    assert math.exp(report.hope) == pytest.approx(1 / CHANGE)
    expecting(report, 1.5)  # and from there on, the average is the larger one
    assert math.exp(report.hope) > 1 / CHANGE
