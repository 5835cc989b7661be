"""Parameters between two steps: averages of where training was. Oracle: the places themselves, averaged in float64."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, mlp
from quasidiag import rest
from quasidiag.quadratic import Report

SIZES = (5, 8, 3)
STEPS = 70


def samples(seed: int) -> tuple[Tensor, Tensor]:
    return batch("categorical", 60, SIZES[0], SIZES[-1], seed=seed % 7)


def rule_of(model: nn.Module | None = None, **options: Any) -> qd.Riemannian:
    return qd.Riemannian(mlp(*SIZES) if model is None else model, qd.Categorical(), **options)


def report_of(rule: qd.Riemannian) -> Report:
    assert rule.auto is not None
    return rule.auto


def now(rule: qd.Riemannian) -> list[Tensor]:
    return [p.detach().clone() for p in rule.model.parameters()]


def backward(rule: qd.Riemannian, seed: int) -> list[Tensor]:
    """One minibatch's gradient, and where it was taken."""
    x, t = samples(seed)
    rule.zero_grad()
    assert rule.criterion is not None
    rule.criterion(rule.model(x), t).backward()
    return now(rule)


def train(rule: qd.Riemannian, seeds: range) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Where training was at each step, and where the parameters came to rest after it."""
    places, rests = [], []
    for seed in seeds:
        places.append(backward(rule, seed))
        rule.step()
        rests.append(now(rule))
    return places, rests


def late(**options: Any) -> qd.Riemannian:
    """With two places that are apart."""
    rule = rule_of(**options)
    train(rule, range(STEPS))
    return rule


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b))


def test_parameters_at_rest_are_the_average_of_where_training_was() -> None:
    rule = rule_of()
    average = now(rule)
    places, rests = train(rule, range(STEPS))
    assert report_of(rule).retreats == 0
    for step in range(1, STEPS):
        part = 1 / rest.window(step)
        average = [x + part * (z - x) for x, z in zip(average, places[step])]
        torch.testing.assert_close(rests[step - 1], average, rtol=1e-12, atol=1e-12)
    assert apart(rests[-2], places[-1]) > 1e-3


def test_training_is_the_same_without_the_average() -> None:
    with_it, without = rule_of(), rule_of(averaged=False)
    places, _ = train(with_it, range(STEPS))
    others, rests = train(without, range(STEPS))
    torch.testing.assert_close(places, others, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rests[:-1], others[1:], rtol=0.0, atol=0.0)
    assert not any("ahead" in kept for kept in without.state.values())


def test_the_window_grows_from_one_place() -> None:
    assert [rest.window(steps) for steps in (0, 20, 100, 600, 10**6)] == [1, 1, 5, 30, 30]


@pytest.mark.parametrize("mode", [True, False])
def test_what_is_not_backpropagated_runs_at_rest(mode: bool) -> None:
    rule = late()
    at_rest, (x, _) = now(rule), samples(0)
    rule.model.train(mode)
    with torch.no_grad():
        seen = rule.model(x)
    torch.testing.assert_close(now(rule), at_rest, rtol=0.0, atol=0.0)
    torch.testing.assert_close(seen, copy.deepcopy(rule.model)(x), rtol=0.0, atol=0.0)


def test_several_passes_move_ahead_once() -> None:
    rule = late()
    twin = copy.deepcopy(rule)
    ahead = backward(rule, 0)
    x, t = samples(1)
    assert rule.criterion is not None
    (rule.criterion(rule.model(x), t)).backward()
    torch.testing.assert_close(now(rule), ahead, rtol=0.0, atol=0.0)
    torch.testing.assert_close(backward(twin, 0), ahead, rtol=0.0, atol=0.0)


def test_what_is_done_to_the_parameters_in_between_stays_done() -> None:
    rule = late()
    before, ahead = now(rule), backward(copy.deepcopy(rule), 0)
    with torch.no_grad():
        for p in rule.model.parameters():
            p.mul_(0.5)
    expected = [z - x / 2 for x, z in zip(before, ahead)]
    torch.testing.assert_close(backward(rule, 0), expected)


def test_a_penalty_on_the_weights_at_rest_is_backpropagated_with_the_loss() -> None:
    """Its graph was made before the forward pass that moves the parameters ahead."""
    rule, (x, t) = late(), samples(0)
    rule.zero_grad()
    penalty = sum(p.square().sum() for p in rule.model.parameters())
    assert rule.criterion is not None
    (rule.criterion(rule.model(x), t) + 1e-3 * penalty).backward()
    rule.step()


def test_a_frozen_layer_stays_where_it_is() -> None:
    rule = late()
    first = next(iter(rule.model.parameters()))
    first.requires_grad_(False)
    before = first.detach().clone()
    train(rule, range(5))
    torch.testing.assert_close(first.detach(), before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("between", [False, True], ids=["at rest", "before the step"])
def test_resuming_goes_on_as_if_nothing_had_happened(between: bool) -> None:
    rule, resumed = late(), rule_of()
    if between:
        backward(rule, STEPS)
    buffer = io.BytesIO()
    torch.save((rule.model.state_dict(), rule.state_dict()), buffer)
    buffer.seek(0)
    model, optimizer = torch.load(buffer)
    resumed.model.load_state_dict(model)
    resumed.load_state_dict(optimizer)
    seeds = range(STEPS, STEPS + 10)
    torch.testing.assert_close(train(resumed, seeds), train(rule, seeds), rtol=0.0, atol=0.0)


def test_a_step_that_is_not_taken_comes_back_to_the_same_rest() -> None:
    rule = late()
    at_rest = now(rule)
    backward(rule, 0)
    next(iter(rule.model.parameters())).grad = torch.full((8, 5), float("nan"), dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="finite"):
        rule.step()
    torch.testing.assert_close(now(rule), at_rest, rtol=1e-12, atol=1e-12)


def test_steps_that_are_taken_back_move_where_training_is_alone() -> None:
    rule = late()
    report = report_of(rule)
    while report.stride < rule.step_every:  # the next minibatch judges
        train(rule, range(report.steps, report.steps + 1))
    at_rest, way = now(rule), [rule.state[p]["update"].clone() for p in rule.model.parameters()]
    ahead, report.promise = backward(rule, 0), 1e-12
    x, t = samples(0)
    with torch.no_grad():  # the way was a bad one
        for p, u in zip(rule.model.parameters(), way):
            p.add_(50 * u)
            rule.state[p]["update"].mul_(51)
            rule.state[p]["ahead"].add_(50 * u)
    assert rule.criterion is not None
    rule.zero_grad()
    rule.criterion(rule.model(x), t).backward()
    retreats = report.retreats
    rule.step()
    assert report.retreats == retreats + 1
    torch.testing.assert_close(now(rule), at_rest, rtol=1e-9, atol=1e-9)
    expected = [z - u for z, u in zip(ahead, way)]
    torch.testing.assert_close(backward(rule, 0), expected, rtol=1e-9, atol=1e-9)


def test_low_precision_stays_with_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    rule = rule_of(model)
    for seed in range(40):
        x, t = samples(seed)
        rule.zero_grad()
        assert rule.criterion is not None
        rule.criterion(rule.model(x.bfloat16()), t).backward()
        rule.step()
    assert not any("ahead" in kept for kept in rule.state.values())


def test_learned_variances_keep_to_their_bounds() -> None:
    model, loss = mlp(*SIZES), qd.LearnedGaussian(SIZES[-1])
    rule = qd.Riemannian(model, loss)
    for seed in range(40):
        x, _ = samples(seed)
        rule.zero_grad()
        loss(model(x), torch.tanh(x[:, :3])).backward()
        rule.step()
        own = [p.detach().clone() for p in loss.parameters()]
        loss.project_()
        assert apart(own, [p.detach() for p in loss.parameters()]) == 0


def test_a_closed_optimizer_leaves_the_parameters_at_rest() -> None:
    rule = late()
    at_rest = now(rule)
    backward(rule, 0)
    rule.close()
    torch.testing.assert_close(now(rule), at_rest, rtol=1e-12, atol=1e-12)
    rule.model(samples(0)[0])
    torch.testing.assert_close(now(rule), at_rest, rtol=1e-12, atol=1e-12)


def test_a_given_lr_averages_nothing() -> None:
    with pytest.raises(ValueError, match="averages"):
        qd.Riemannian(nn.Linear(2, 2), lr=0.1, averaged=True)
