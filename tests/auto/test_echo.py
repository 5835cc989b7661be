"""What the next minibatch finds left of a step's slope, and what follows from it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto.descent import LONGER, SOON
from quasidiag.auto.quadratic import BOUNDS, HALF, OWN, QuadraticModel
from quasidiag.auto.replay import Replay
from quasidiag.auto.report import ECHO, ECHOES, LOUDEST, WARM_UP, WHOLE, Report

LATE = 10 * WARM_UP


def judge(report: Report) -> QuadraticModel:
    return QuadraticModel(cast(Replay, None), 1.0, report)


def listener(**numbers: Any) -> Report:
    return Report(**{"steps": LATE, "falls": [-2.0], "extent": 1.0, **numbers})  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [0.5, 0.0, -0.4])
def test_it_is_the_part_of_the_slope_that_is_left(left: float) -> None:
    report = listener()
    report.heard(-2.0 * left)
    assert report.echo == pytest.approx(ECHO * left)
    for _ in range(100):
        report.heard(-2.0 * left)
    assert report.echo == pytest.approx(left)


def test_what_tells_nothing_is_not_heard() -> None:
    for numbers in ({"steps": WARM_UP}, {"falls": []}, {"extent": WHOLE / 2}):
        assert not listener(**numbers).listens
    report = listener()
    assert report.listens
    report.heard(float("nan"))
    assert report.echo == 0.0
    report.heard(1e9)
    assert report.echo == -ECHO * LOUDEST


def test_the_damping_is_bounded_by_less_where_curvature_is_common() -> None:
    low, shared, high, _ = BOUNDS
    first, certain = ECHOES
    for echo, bound in ((0.5, high), (first, high), (certain, shared), (-1.0, shared)):
        report = listener(usual=3.0, echo=echo)
        judge(report)._damp(1e9, 0.0)
        assert report.damping == pytest.approx(3 * bound)
        judge(report)._damp(1e9, 1e6)  # a step was taken back
        assert report.damping == 1e6
        judge(report)._damp(0.0, 0.0)
        assert report.damping == pytest.approx(3 * low)
    between = listener(usual=3.0, echo=(first + certain) / 2)
    judge(between)._damp(1e9, 0.0)
    assert 3 * shared < between.damping < 3 * high


def test_deviations_become_an_average_of_the_last_minibatches() -> None:
    """The part of their natural step falls like that of an average over all minibatches, to one over the last 25."""
    report = Report(curvature=1.0)
    parts = []
    for report.steps in range(60):
        parts.append(judge(report).part(report.warmth))
        whole = parts[-1] if report.steps else 2 / 3  # of which a half is the most
        assert judge(report).part(0.1 * report.warmth) == pytest.approx(0.1 * whole)
    assert judge(Report(curvature=1.0)).part(1.0) == HALF
    assert parts[0] == HALF and parts[1:40] == pytest.approx([2 / (k + 3) for k in range(1, 40)])
    assert parts[47:] == pytest.approx([OWN] * 13)
    kept = 1.0  # of the fifth minibatch, after twenty: each weighs as much more as it came later
    for part in parts[5:20]:
        kept *= 1 - part
    assert parts[4] * kept / parts[19] == pytest.approx((4 + 2) / (19 + 2))
    report.damping = 1.0
    assert judge(report).part(1.0) == pytest.approx(OWN / 2)


@pytest.mark.parametrize("lr", [0.5, 1.0, 1.2, 2.0])
def test_steps_are_longer_after_the_first_where_curvature_is_common(lr: float) -> None:
    model, loss = mlp(5, 6, 3), qd.Gaussian()
    optimizer = qd.Riemannian(model, loss, lr=lr, step="auto", averaged=False)
    report, (x, t) = optimizer.auto, batch("gaussian", 500, 5, 3)
    assert report is not None
    for steps, echo, part in ((SOON, -1.0, 1.0), (4 * SOON, -1.0, 0.25), (SOON, 0.0, 0.0)):
        report.steps, report.echo, report.falls = steps, echo, []
        report.stride = 4
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        longer = max(1.0, min(LONGER, LONGER / lr))
        assert report.factor == pytest.approx(lr * (1 + (longer - 1) * part))


@pytest.mark.parametrize(("lr", "samples"), [(0.5, 500), (1.2, 500), (1.0, 200), (1.0, 500)])
def test_shortened_and_prolonged_steps_are_not_heard(lr: float, samples: int) -> None:
    model, loss = mlp(5, 6, 3), qd.Gaussian()
    optimizer = qd.Riemannian(model, loss, lr=lr, step="auto")
    report = optimizer.auto
    assert report is not None
    for seed in range(10):
        report.steps = max(report.steps, LATE)
        x, t = batch("gaussian", samples, 5, 3, seed=seed)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    assert (report.echo != 0) == (lr == 1 and samples == 500)


@pytest.mark.parametrize("every", [1, 4])
def test_it_is_heard_in_the_step_after_a_measured_one(every: int) -> None:
    """Against slope and fall from the parameters themselves."""
    torch.manual_seed(0)
    model, loss = mlp(5, 6, 3), qd.LearnedGaussian(3).double()
    optimizer = qd.Riemannian(model, loss, step="auto", step_every=every, averaged=False)
    report = optimizer.auto
    assert report is not None
    report.steps = LATE
    heard = 0
    before, fall = None, 0.0
    for seed in range(13):
        x, t = batch("gaussian", 500, 5, 3, seed=seed)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        place = [p.detach().clone() for p in model.parameters()]
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        echo, stride = report.echo, report.stride
        part = report.extent
        retreats = report.retreats
        optimizer.step()
        if report.retreats > retreats:
            before = None
            continue
        if stride == 1 and part > WHOLE and before is not None:
            slope = sum(float((g * (z - y)).sum()) for g, z, y in zip(grads, place, before))
            expected = min(max(slope / fall, -LOUDEST), LOUDEST)
            assert report.echo == pytest.approx(echo + ECHO * (expected - echo), rel=1e-6)
            heard += 1
        else:
            assert report.echo == echo
        moved = [p.detach() - z for p, z in zip(model.parameters(), place)]
        fall = sum(float((g * d).sum()) for g, d in zip(grads, moved))
        if report.stride == 1:
            assert report.extent == pytest.approx(report.factor * report.damped)
        before = place
    assert heard >= 3
