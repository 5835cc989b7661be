"""How much of what the loss could fall a step promises: what tells noise from data that are known by heart."""

import math
from typing import cast

import pytest
import torch
from torch import nn

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto.quadratic import BOUNDS, LITTLE, QuadraticModel
from quasidiag.auto.replay import Replay
from quasidiag.auto.report import ECHOES, RISES, Report


def judge(report: Report) -> QuadraticModel:
    return QuadraticModel(cast(Replay, None), None, report)


def trained(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> Report:
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    for x, t in data:
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    assert optimizer.auto is not None
    return optimizer.auto


def test_the_grasp_is_the_promise_relative_to_the_loss() -> None:
    model, loss = mlp(5, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=0.1, step="auto", step_every=1)
    report, (x, t) = optimizer.auto, batch("categorical", 60, 5, 3)
    assert report is not None
    grasps = []
    for step in range(4):
        optimizer.zero_grad()
        now = loss(model(x), t)
        now.backward()
        optimizer.step()
        grasps.append(math.log(report.small * report.unbounded / float(now.detach())))
        assert report.small == pytest.approx(1.0 if step else math.sqrt(60 / 500))  # or the same
        if step == 0:  # not damped yet
            assert report.unbounded == pytest.approx(report.promise, rel=1e-3)
    assert report.grasp == pytest.approx(sum(grasps) / len(grasps))


def test_a_loss_without_a_least_value_has_none() -> None:
    model, loss = mlp(5, 6, 3), qd.LearnedGaussian(3)
    optimizer = qd.Riemannian(model, loss)
    x, t = batch("gaussian", 60, 5, 3)
    for _ in range(5):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    assert optimizer.auto is not None and optimizer.auto.grasp == 0.0


def test_the_bound_on_the_damping_grows_where_little_is_promised() -> None:
    _, shared, high, highest = BOUNDS
    little = math.log(LITTLE)
    for grasp, bound in (
        (0.0, high),
        (little, high),
        (little - 0.2, high * math.exp(0.4)),
        (little - 10, highest),
        (-1e4, highest),
    ):
        report = Report(usual=2.0, grasp=grasp)
        judge(report)._damp(1e9, 0.0)
        assert report.damping == pytest.approx(2 * bound)
    report = Report(usual=2.0, grasp=-1e4, echo=ECHOES[1])
    judge(report)._damp(1e9, 0.0)
    assert report.damping == pytest.approx(2 * shared)


def test_a_small_minibatch_is_mostly_noise() -> None:
    """With fewer samples than parameters, a model can always learn them; the bound must not be low for that."""
    torch.manual_seed(0)
    x, t = torch.randn(1000, 20), torch.randint(3, (1000,))
    noise = [(x[i : i + 10], t[i : i + 10]) for i in range(0, 1000, 10)]
    assert trained(nn.Sequential(nn.Linear(20, 3)), noise).grasp < math.log(LITTLE) - 0.5


def test_the_damping_rises_faster_where_minibatches_have_little_in_common() -> None:
    common, own = RISES
    assert Report(echo=ECHOES[1]).rise == pytest.approx(common)
    assert Report(echo=0.0).rise == own
    assert common < Report(echo=sum(ECHOES) / 2).rise < own


@pytest.mark.usefixtures("full")
def test_noise_is_told_from_what_is_known_by_heart() -> None:
    torch.manual_seed(0)
    noise = [(torch.randn(500, 20), torch.randint(3, (500,))) for _ in range(60)]
    assert trained(nn.Sequential(nn.Linear(20, 3)), noise).grasp < math.log(LITTLE) - 1
    x, t = torch.randn(200, 20), torch.randint(3, (200,))
    heart = [(x[i % 2 :: 2], t[i % 2 :: 2]) for i in range(60)]
    net = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 3))
    assert trained(net, heart).grasp > math.log(LITTLE)
