"""GradScaler: a scaled loss gives the metric of the loss, and a skipped step leaves no trace."""

from __future__ import annotations

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, problem, train, values
from torch import nn

import quasidiag as qd


def scaled_steps(model, loss, optimizer, scaler, x, t, steps: int = 3, clip: bool = False) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss(model(x), t)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", METRICS)
def test_with_a_criterion_nothing_need_be_said(kind: str, clip: bool) -> None:
    ends = []
    for scaled in (False, True):
        model, loss, x, t = problem()
        before = values(model)
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
        if scaled:
            scaled_steps(model, loss, optimizer, torch.amp.GradScaler("cpu"), x, t, clip=clip)
        else:
            train(model, loss, optimizer, x, t, 3)
        assert_moved(before, model)
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends, tolerance=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clip", [False, True])
def test_without_a_criterion_the_scale_is_given(clip: bool, reduction: str) -> None:
    ends = []
    loss = nn.CrossEntropyLoss(reduction=reduction)
    for scaled in (False, True):
        model, _, x, t = problem()
        if scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
            optimizer = qd.QDOP(
                model, lr=0.05, loss_reduction=reduction, loss_scale=scaler.get_scale
            )
            scaled_steps(model, loss, optimizer, scaler, x, t, clip=clip)
            assert scaler.get_scale() == 2.0**13
        else:
            optimizer = qd.QDOP(model, lr=0.05, loss_reduction=reduction)
            train(model, loss, optimizer, x, t, 3)
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends, tolerance=1e-9)


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0)])
def test_a_constant_scale(scale: float | torch.Tensor) -> None:
    ends = []
    for factor in (1.0, scale):
        model, _, x, t = problem()
        optimizer = qd.QDOP(model, lr=0.0, loss_scale=factor)
        (factor * nn.functional.cross_entropy(model(x), t)).backward()
        optimizer.step()
        ends.append(metric(optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("kind", METRICS)
def test_a_skipped_step_leaves_no_trace(kind: str, by_model: bool) -> None:
    ends = []
    for spoilt in (False, True):
        model, loss, x, t = problem()
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, seed=1)
        scaler = torch.amp.GradScaler("cpu")
        scaled_steps(model, loss, optimizer, scaler, x, t, 2)
        if spoilt:
            before, kept, draws = values(model), metric(optimizer), optimizer._collector.generator
            place = None if draws is None else draws.get_state()
            scale = scaler.get_scale()
            optimizer.zero_grad()
            scaler.scale(loss(model(x), t)).backward()
            model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale / 2
            assert_same(before, values(model), 0.0)
            assert_same(kept, metric(optimizer), 0.0)
            model.zero_grad() if by_model else optimizer.zero_grad()
            if draws is not None:
                draws.set_state(place)
        scaled_steps(model, loss, optimizer, scaler, x, t, 2)
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends, tolerance=1e-9)


@pytest.mark.parametrize("kind", METRICS)
def test_float16_autocast_with_a_scaler_learns(kind: str) -> None:
    model, loss, x, t = problem()
    model, x = model.float(), x.float()
    optimizer = qd.Riemannian(model, loss, lr=0.02, metric=kind)
    scaler = torch.amp.GradScaler("cpu")
    first = float(loss(model(x), t))
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss(model(x), t)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    assert float(loss(model(x), t)) < 0.9 * first
    assert all(m.isfinite().all() for m in metric(optimizer))


def test_tiny_derivatives_survive_float16_with_a_scaler() -> None:
    """The metric's own vectors travel as large as the scaled gradient does; 1e-8 is nothing in float16."""
    found = []
    for half in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
        with torch.no_grad():
            model[1].weight.mul_(1e-4)
            model[2].weight.mul_(1e-4)
        loss, x, t = qd.Categorical(), torch.randn(8, 4), torch.arange(8) % 3
        optimizer = qd.QDNat(model, loss, lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            value = loss(model(x), t)
        scaler.scale(value).backward()
        optimizer.step()
        found.append(optimizer.moments(model[0]).m00)
    assert 0 < float(found[0].max()) < 1e-12
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0.0)
