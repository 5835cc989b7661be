"""Steps between two measurements: they go on as measured, and are judged together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import averages, batch, mlp
from quasidiag.auto import proposal, rhythm
from quasidiag.auto.directions import before_way
from quasidiag.auto.report import RECENT, Report

pytestmark = pytest.mark.usefixtures("warm", "full")
SIZES = (5, 8, 3)


class Counting(nn.Module):
    """How often the model runs, whoever runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(*SIZES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


def samples(seed: int) -> tuple[Tensor, Tensor]:
    return batch("categorical", 60, SIZES[0], SIZES[-1], seed=seed)


def train(rule: qd.Riemannian, x: Tensor, t: Tensor) -> None:
    assert rule.criterion is not None
    rule.zero_grad()
    rule.criterion(rule.model(x), t).backward()
    rule.step()


def started(
    steps: int = rhythm.AT_FIRST, model: nn.Module | None = None, **options: Any
) -> tuple[qd.Riemannian, Report]:
    """A rule that has taken so many steps at a small factor, on samples that resemble each other."""
    model = mlp(*SIZES) if model is None else model
    rule = qd.Riemannian(model, qd.Categorical(), lr=0.05, step="auto", **options)
    for step in range(steps):
        train(rule, *samples(step % 3))
    assert rule.auto is not None and rule.auto.retreats == 0
    return rule, rule.auto


def way(rule: qd.Riemannian) -> list[Tensor]:
    return [rule.state[p]["update"].clone() for p in rule.model.parameters()]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_the_model_is_measured_every_so_many_steps(every: int) -> None:
    model = Counting()
    rule = qd.Riemannian(model, qd.Categorical(), lr=0.05, step="auto", step_every=every)
    x, t = samples(0)
    seen, strides = [], []
    for _ in range(rhythm.AT_FIRST + 8):
        before = model.calls
        train(rule, x, t)
        seen.append(model.calls - before)
        assert rule.auto is not None
        strides.append(rule.auto.stride)
    assert strides[: rhythm.AT_FIRST] == [1] * rhythm.AT_FIRST
    expected = [1, *[i % every + 1 for i in range(1, 9)]] if every > 1 else [1] * 9
    assert strides[rhythm.AT_FIRST - 1 :] == expected
    # With its derivatives along the direction, and once from where the way began.
    assert {calls for calls, stride in zip(seen[2:], strides[2:]) if stride == 1} == {3}
    assert {calls for calls, stride in zip(seen, strides) if stride > 1} <= {1}


def test_a_step_in_between_follows_its_own_direction_as_far_as_its_slope_allows() -> None:
    rule, report = started()
    measured, steep = dict(report.coefficients), dict(report.slopes)
    for seed in (4, 5, 6):
        twin = copy.deepcopy(rule)
        x, t = samples(seed)
        before = [p.detach().clone() for p in rule.model.parameters()]
        train(rule, x, t)
        if report.stride == 1:
            break
        twin.zero_grad()
        assert twin.criterion is not None
        twin.criterion(twin.model(x), t).backward()
        with torch.no_grad():
            gradient = {p: twin._gradient(p) for p in twin.model.parameters()}
            direction = proposal.propose(twin, gradient, measures=False).direction
        slope = sum(float((gradient[p] * u).sum()) for p, u in direction.items())
        part = min(max(slope / steep["new"], 0.0), 1.0)
        for p, q, old in zip(rule.model.parameters(), twin.model.parameters(), before):
            step = 0.05 * part * measured["new"] * direction[q]
            torch.testing.assert_close(p.detach(), old + step, rtol=1e-9, atol=1e-12)
        assert report.alpha == pytest.approx(-0.05 * part * measured["new"])
    assert report.stride > 1


def test_the_average_reaches_back_over_a_part_of_the_training() -> None:
    assert [proposal.reach(steps) for steps in (0, 250, 500, 1500, 10**6)] == [5, 5, 10, 30, 30]


def test_what_gets_its_first_gradient_late_is_averaged_over_what_there_is() -> None:
    """It is not a thirtieth of itself: weights are relative to their sum, the newest gradient counting twice."""
    state: dict[str, Any] = {}
    first, second = torch.randn(2, 5, dtype=torch.float64)
    new = 1 / proposal.MOST
    torch.testing.assert_close(averages([state], [first], new), [first])
    weights = torch.tensor([(1 - new) ** 2 * new, (1 - new) * new + new], dtype=torch.float64)
    expected = (weights / weights.sum()) @ torch.stack([first, second])
    torch.testing.assert_close(averages([state], [second], new), [expected])


def test_the_way_is_the_sum_of_the_steps_and_is_judged_as_a_whole() -> None:
    rule, report = started(averaged=False)
    train(rule, *samples(0))
    start = [p.detach() - u for p, u in zip(rule.model.parameters(), way(rule))]
    while report.stride < rhythm.step_every(rule):
        train(rule, *samples(report.stride % 3))
    ends = [p.detach().clone() for p in rule.model.parameters()]
    torch.testing.assert_close(way(rule), [b - a for a, b in zip(start, ends)])
    x, t = samples(7)
    now = qd.Categorical()(rule.model(x), t)
    then_model = copy.deepcopy(rule.model)
    with torch.no_grad():
        for p, old in zip(then_model.parameters(), start):
            p.copy_(old)
    then, expected = qd.Categorical()(then_model(x), t), rhythm.step_every(rule) * report.predicted
    train(rule, x, t)
    assert report.stride == 1
    assert report.actual == pytest.approx(float((now - then).detach()), rel=1e-6)
    assert report.ratio == pytest.approx(report.actual / expected)


def test_all_of_a_way_that_did_harm_is_taken_back() -> None:
    rule, report = started()
    while report.stride < 3:
        train(rule, *samples(report.stride % 3))
    start = [p.detach() - u for p, u in zip(rule.model.parameters(), way(rule))]
    with torch.no_grad():
        for p in rule.model.parameters():
            far = torch.linspace(-1e3, 1e3, p.numel(), dtype=p.dtype).view_as(p)
            p.add_(far)
            rule.state[p]["update"].add_(far)
    train(rule, *samples(0))  # a loss like that is a surprise
    assert report.retreats == 1 and report.stride == 0 and not report.steady
    torch.testing.assert_close([p.detach() for p in rule.model.parameters()], start)
    train(rule, *samples(0))
    assert report.stride == 1  # and what comes after is measured


def test_a_surprise_is_measured_at_once() -> None:
    rule, report = started(2 * rhythm.AT_FIRST)
    while report.stride != 2:
        train(rule, *samples(report.stride % 3))
    x, _ = samples(0)
    worst = rule.model(x).argmin(1).detach()
    train(rule, x, worst)
    assert report.stride == 1


def test_what_is_a_surprise() -> None:
    report = Report()
    losses = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9]
    for loss in losses:
        assert not report.surprised(loss)
    assert report.losses * RECENT > 0.5
    level, spread = report.level, report.spread
    assert level == pytest.approx(1.0, abs=0.05) and spread**0.5 == pytest.approx(0.08, abs=0.03)
    assert not report.surprised(0.1)  # less is none
    for loss in (1e9, float("inf"), float("nan")):
        report.level, report.spread = level, spread
        assert report.surprised(loss)
        assert report.level < level + 0.1  # nor is it the new usual


def test_other_parameters_are_measured() -> None:
    """A layer that rests has no part in the way, and one that comes back none in the coefficients."""
    rule, report = started()
    while report.stride != 2:
        train(rule, *samples(report.stride % 3))
    model = rule.model
    assert isinstance(model, nn.Sequential)
    model[0].requires_grad_(False)
    train(rule, *samples(0))
    assert report.stride == 1
    model[0].requires_grad_(True)
    train(rule, *samples(0))
    assert report.stride == 1


def test_the_last_minibatch_of_an_epoch_does_not_measure() -> None:
    rule, report = started()
    while report.stride < rhythm.step_every(rule):
        train(rule, *samples(report.stride % 3))
    x, t = samples(0)
    train(rule, x[:7], t[:7])
    assert report.stride == rhythm.step_every(rule) + 1
    train(rule, x, t)
    assert report.stride == 1


def test_resumed_on_the_way() -> None:
    rule, report = started()
    while report.stride != 3:
        train(rule, *samples(report.stride % 3))
    twin = qd.Riemannian(copy.deepcopy(rule.model), qd.Categorical(), lr=0.05, step="auto")
    twin.load_state_dict(copy.deepcopy(rule.state_dict()))
    for seed in range(6):
        for one in (rule, twin):
            train(one, *samples(seed % 3))
    for p, q in zip(rule.model.parameters(), twin.model.parameters()):
        assert torch.equal(p, q)
    assert vars(report) == vars(twin.auto)


def test_losses_that_were_all_the_same_are_no_measure() -> None:
    """Nor is a report without any."""
    report = Report(steps=1000)
    for _ in range(20):
        assert not report.surprised(1.0)
    rises = [report.surprised(2.0 + 0.1 * (k % 3)) for k in range(50)]
    assert sum(rises) < 10 and report.level == pytest.approx(2.1, abs=0.1)


def test_other_proportions_of_the_groups_are_measured() -> None:
    model = mlp(*SIZES)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    rule = qd.Riemannian(model, qd.Categorical(), lr=0.05, step="auto", params=groups)
    report = rule.auto
    assert report is not None
    for step in range(rhythm.AT_FIRST + 1):
        train(rule, *samples(step % 3))
    assert report.stride == 2 and report.parts == [0.0, 1.0]
    for group in rule.param_groups:
        group["lr"] *= 0.3
    train(rule, *samples(0))
    assert report.stride == 3  # all of them smaller is no other proportion
    rule.param_groups[0]["lr"] = 0.015
    train(rule, *samples(0))
    assert report.stride == 1 and report.parts == [1.0, 1.0]


def test_parameters_of_low_precision_go_back_where_they_were() -> None:
    model = mlp(*SIZES).bfloat16()
    rule = qd.Riemannian(model, qd.Categorical(), lr=0.01, step="auto")
    x, t = samples(0)
    x = x.bfloat16()
    for _ in range(rhythm.AT_FIRST):
        train(rule, x, t)
    report = rule.auto
    assert report is not None and report.stride == 1
    start = [*before_way(dict(zip(model.parameters(), way(rule)))).values()]
    while report.stride < 4:
        train(rule, x, t)
    assert report.retreats == 0
    back = [*before_way(dict(zip(model.parameters(), way(rule)))).values()]
    for p, q in zip(start, back):
        assert torch.equal(p, q)


def test_a_layer_that_was_frozen_stays_when_the_others_go_back() -> None:
    rule, report = started()
    model = rule.model
    assert isinstance(model, nn.Sequential)
    with torch.no_grad():
        far = torch.linspace(-1e3, 1e3, 24, dtype=torch.float64).view(3, 8)
        model[2].weight.add_(far)
        rule.state[model[2].weight]["update"].add_(far)
    model[0].requires_grad_(False)
    frozen, pushed = model[0].weight.clone(), model[2].weight.detach().clone()
    train(rule, *samples(0))
    assert report.retreats == 1 and torch.equal(model[0].weight, frozen)
    assert (model[2].weight.detach() - pushed).abs().max() > 900


def test_a_minibatch_of_which_only_the_gradient_is_bad_judges_nothing() -> None:
    rule, report = started(step_every=1)
    x, t = samples(0)
    before = copy.deepcopy(report)
    for _ in range(3):
        rule.zero_grad()
        assert rule.criterion is not None
        rule.criterion(rule.model(x), t).backward()
        next(rule.model.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
        with pytest.warns(RuntimeWarning, match="skipped"):
            rule.step()
    assert (report.trend, report.damping) == (before.trend, before.damping)
    assert (report.stride, report.steps) == (before.stride, before.steps)


def test_a_loss_that_is_divided_in_place_counts_as_it_was() -> None:
    rule, _ = started()
    x, t = samples(0)
    rule.zero_grad()
    assert rule.criterion is not None and rule._model is not None
    loss = rule.criterion(rule.model(x), t)
    expected = float(loss.detach()) / 4
    loss /= 4
    loss.backward()
    assert rule._model.replay.loss() == pytest.approx(expected)
    rule.step()


def test_a_state_of_another_precision() -> None:
    rule, _ = started()
    model = copy.deepcopy(rule.model).float()
    twin = qd.Riemannian(model, qd.Categorical(), lr=0.05, step="auto")
    twin.load_state_dict(copy.deepcopy(rule.state_dict()))
    for seed in range(6):
        x, t = samples(seed % 3)
        train(twin, x.float(), t)
    assert all(p.isfinite().all() for p in model.parameters())
    assert twin.auto is not None and twin.auto.steps == rhythm.AT_FIRST + 6
