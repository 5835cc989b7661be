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
from quasidiag import kernels
from quasidiag.auto import rest, rhythm
from quasidiag.auto.report import Report

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
    early = slice(STEPS // 2)  # rounding grows from step to step
    torch.testing.assert_close(places[early], others[early], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rests[:-1], others[1:], rtol=0.0, atol=0.0)
    assert not any("apart" in kept for kept in without.state.values())


def test_the_window_grows_from_one_place() -> None:
    assert [rest.window(steps) for steps in (0, 7, 70, 300, 10**6)] == [1, 1, 10, 30, 30]


@pytest.mark.parametrize(("training", "gradients"), [(True, False), (False, True)])
def test_what_is_not_training_runs_at_rest(training: bool, gradients: bool) -> None:
    rule = late()
    at_rest, (x, _) = now(rule), samples(0)
    rule.model.train(training)
    with torch.set_grad_enabled(gradients):
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


@pytest.mark.parametrize("written", ["parameter", "data"])
def test_what_is_done_to_a_parameter_in_between_stays_done(written: str) -> None:
    """Training goes on from there, and with the others from where it was."""
    rule = late()
    ahead = backward(copy.deepcopy(rule), 0)
    changed = next(iter(rule.model.parameters()))
    with torch.no_grad():
        (changed if written == "parameter" else changed.data).clamp_(-0.1, 0.1)
    expected = [changed.detach().clone(), *ahead[1:]]
    torch.testing.assert_close(backward(rule, 0), expected, rtol=0.0, atol=0.0)


def test_weights_that_are_masked_after_each_step_are_masked_in_training() -> None:
    rule = rule_of()
    first = next(iter(rule.model.parameters()))
    mask = (torch.arange(first.numel()) % 3 > 0).view_as(first)
    for seed in range(STEPS):
        backward(rule, seed)
        assert not seed or not first.detach()[~mask].any()
        rule.step()
        first.data.mul_(mask)


def test_masks_hold_after_a_resume() -> None:
    rule, resumed = late(), rule_of()
    first, second = (next(iter(r.model.parameters())) for r in (rule, resumed))
    mask = (torch.arange(first.numel()) % 3 > 0).view_as(first)
    first.data.mul_(mask)
    resumed.model.load_state_dict(rule.model.state_dict())
    resumed.load_state_dict(rule.state_dict())
    backward(resumed, 0)
    assert not second.detach()[~mask].any()


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
    for in_training, at_rest in zip(*train(rule, range(5))):
        assert torch.equal(in_training[0], before) and torch.equal(at_rest[0], before)


def test_a_group_without_a_step_stays_where_it_is() -> None:
    model = mlp(*SIZES)
    first, *others = model.parameters()
    rule = rule_of(model, params=[{"params": [first]}, {"params": others}])
    train(rule, range(STEPS))
    rule.param_groups[0]["lr"] = 0.0
    before = first.detach().clone()
    train(rule, range(5))
    torch.testing.assert_close(first.detach(), before, rtol=1e-12, atol=1e-12)


def test_passes_of_a_frozen_model_change_nothing() -> None:
    """As of a discriminator while its generator is trained; and freezing it between backward pass and step."""
    rule = late()
    twin = copy.deepcopy(rule)
    x, _ = samples(0)
    for seed in range(5):
        rule.model.requires_grad_(False)
        rule.model(x.clone().requires_grad_()).sum().backward()
        rule.model.requires_grad_(True)
        backward(rule, seed), backward(twin, seed)
        rule.step(), twin.step()
    torch.testing.assert_close(now(rule), now(twin), rtol=0.0, atol=0.0)
    backward(rule, 5)
    rule.model.requires_grad_(False)
    rule.model.requires_grad_(True)
    torch.testing.assert_close(backward(rule, 5), backward(twin, 5), rtol=0.0, atol=0.0)


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


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_step_that_is_not_taken_comes_back_to_the_same_rest(nonfinite: str) -> None:
    rule = late(nonfinite=nonfinite)
    at_rest = now(rule)
    backward(rule, 0)
    next(iter(rule.model.parameters())).grad = torch.full((8, 5), float("nan"), dtype=torch.float64)
    skipped = pytest.warns(RuntimeWarning, match="finite")
    with skipped if nonfinite == "skip" else pytest.raises(FloatingPointError, match="finite"):
        rule.step()
    torch.testing.assert_close(now(rule), at_rest, rtol=1e-12, atol=1e-12)


def judged(rule: qd.Riemannian) -> tuple[list[Tensor], list[Tensor]]:
    """Up to the step that judges, which finds great harm: where training was, and at rest, when that way began."""
    report, began, rested = report_of(rule), now(rule), now(rule)
    measured = False
    while not measured or report.stride < rhythm.step_every(rule):
        before = now(rule)
        (place,), _ = train(rule, range(report.steps, report.steps + 1))
        if report.stride == 1:
            measured, began, rested = True, place, before
    harm(rule)
    return began, rested


def harm(rule: qd.Riemannian) -> None:
    """A step that judges the way since the last measurement, as if it had been a bad one."""
    report = report_of(rule)
    backward(rule, 0)
    with torch.no_grad():
        for p in rule.model.parameters():
            p.sub_(rule.state[p]["update"], alpha=50)
            rule.state[p]["update"].mul_(-49)
    retreats, report.promise, report.stride = report.retreats, 1e-12, rhythm.step_every(rule)
    backward(rule, 0)
    rule.step()
    assert report.retreats == retreats + 1


def test_what_is_taken_back_is_taken_out_of_the_average() -> None:
    rule = late()
    began, rested = judged(rule)
    assert apart(began, rested) > 1e-3
    torch.testing.assert_close(now(rule), rested, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(backward(rule, 0), began, rtol=1e-9, atol=1e-9)


def test_what_is_taken_back_after_a_resume_is_taken_out_of_the_average() -> None:
    rule = late()
    other = rule_of(copy.deepcopy(rule.model))
    other.load_state_dict(rule.state_dict())
    for a, b in zip(judged(rule), judged(other)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(now(rule), now(other), rtol=1e-9, atol=1e-9)


def test_what_was_put_elsewhere_has_no_rest_to_come_back_to() -> None:
    rule = late()
    judged(rule)
    for _ in range(3):  # the first of them is measured, and the rest there marked
        train(rule, range(1))
    with torch.no_grad():
        for p in rule.model.parameters():
            p.mul_(0.5)
    put = now(rule)
    train(rule, range(1))
    harm(rule)
    at_rest = now(rule)
    torch.testing.assert_close(at_rest, put, rtol=1e-9, atol=1e-9)  # a retreat goes no further back
    torch.testing.assert_close(backward(rule, 0), at_rest, rtol=0.0, atol=0.0)


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
    assert not any("apart" in kept for kept in rule.state.values())


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


def test_a_closed_optimizer_moves_nothing() -> None:
    rule = late()
    at_rest = now(rule)
    rule.close()
    rule.model(samples(0)[0])
    torch.testing.assert_close(now(rule), at_rest, rtol=0.0, atol=0.0)


def test_an_average_that_was_saved_ends_where_none_is_wanted() -> None:
    rule, other = late(), rule_of(averaged=False)
    other.model.load_state_dict(rule.model.state_dict())
    other.load_state_dict(rule.state_dict())
    seeds = range(STEPS, STEPS + 3)
    (places, _), (others, rests) = train(rule, seeds), train(other, seeds)
    torch.testing.assert_close(places, others, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rests[:-1], others[1:], rtol=0.0, atol=0.0)


def test_a_given_lr_averages_nothing() -> None:
    with pytest.raises(ValueError, match="averages"):
        qd.Riemannian(nn.Linear(2, 2), lr=0.1, averaged=True)
    with pytest.raises(ValueError, match="averaged"):
        rule_of(averaged="no")


def test_a_closed_optimizer_leaves_the_model_at_rest() -> None:
    model, loss = mlp(4, 6, 3), qd.Categorical()
    x, t = batch("categorical", 40, 4, 3)
    with qd.Riemannian(model, loss) as optimizer:
        for _ in range(30):
            optimizer.zero_grad()
            loss(model(x), t).backward()
            optimizer.step()
        rest = [p.detach().clone() for p in model.parameters()]
        model(x)
        assert not all(map(torch.equal, rest, model.parameters()))
    torch.testing.assert_close([p.detach() for p in model.parameters()], rest)


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_what_is_loaded_on_another_processor_goes_on_where_it_was(how: str) -> None:
    """Which sums up norms in another order, and finds them a little longer or shorter; here, they are said to be."""
    rule = late()
    for state in rule.state.values():
        if "norm" in state:
            state["norm"] = torch.nextafter(state["norm"], torch.zeros_like(state["norm"]))
    if how == "state_dict":
        other = rule_of(copy.deepcopy(rule.model))
        other.load_state_dict(rule.state_dict())
    else:
        other = copy.deepcopy(rule)
    before = now(other)
    assert apart(before, backward(other, 0)) > 1e-3  # ahead of where it rested
    assert (
        apart(now(rule), backward(rule, 0)) == 0
    )  # nobody but a hand on them can have changed these


def test_a_pass_that_no_kernel_leads_takes_nothing_for_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch finds the norms that a kernel left with other roundings."""
    model, loss = mlp(SIZES[0], 200, SIZES[-1]).float(), qd.Categorical()
    rule = qd.Riemannian(model, loss)
    x, t = samples(0)
    for _ in range(30):
        rule.zero_grad()
        loss(rule.model(x.float()), t).backward()
        rule.step()
    before = now(rule)
    monkeypatch.setattr(kernels, "lead_", lambda *_: None)
    rule.model(x.float())
    for p, still in zip(rule.model.parameters(), before):
        assert "mark" in rule.state[p]
        torch.testing.assert_close(p, still + rule.state[p]["apart"], rtol=0, atol=0)
        assert not torch.equal(p, still)


def test_what_changed_after_it_was_loaded_stays_where_it_was_put() -> None:
    rule = late()
    other = rule_of(copy.deepcopy(rule.model))
    other.load_state_dict(rule.state_dict())
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.001)
    assert apart(now(other), backward(other, 0)) == 0
