"""How far a step may go, and what keeps one that went too far from stopping everything."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, linear_layers, mlp
from quasidiag.auto import descent, proposal, quadratic, rhythm


def train(
    model: nn.Module, loss: qd.OutputModel, rule: qd.Riemannian, x: Tensor, t: Tensor
) -> float:
    rule.zero_grad()
    value = loss(model(x), t)
    value.backward()
    rule.step()
    return float(value.detach())


def push(rule: qd.Riemannian, p: Tensor) -> None:
    """As if the last step had gone too far."""
    far = torch.linspace(-1e3, 1e3, p.numel(), dtype=p.dtype).view_as(p)
    p.add_(far)
    rule.state[p]["update"].add_(far)


def parts(rule: qd.Riemannian, before: dict[Tensor, Tensor], own: bool = False) -> Any:
    """What each layer moved by in the metric, relative to its weights or to those of the mean layer, unit by unit.

    With ``own`` relative to its weights, or a tenth of the mean layer's, whose squared length is returned too.
    """
    steps, weights = [], []
    for layer in linear_layers(rule.model):
        moments = rule.moments(layer)
        assert moments.m00 is not None and moments.m0i is not None and moments.mii is not None
        mean = moments.m0i / moments.m00.unsqueeze(1)
        variance = moments.mii - mean * moments.m0i
        b, w = ((p - before[p]).detach() for p in (layer.bias, layer.weight))
        bias = (moments.m00 * (b + (mean * w).sum(1)).square()).sum()
        steps.append(float(bias + (variance * w.square()).sum()))
        weights.append(float((variance * before[layer.weight].square()).sum()) / len(w))
    usual = math.exp(sum(map(math.log, weights)) / len(weights))
    units = [layer.out_features for layer in linear_layers(rule.model)]
    least = 0.01 * usual if own else usual
    found = [(x / n / max(w, least)) ** 0.5 for x, n, w in zip(steps, units, weights)]
    return (found, usual) if own else found


def deep(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Eight sigmoid layers as torch initialises them: hardly anything arrives at the output."""
    torch.manual_seed(0)
    sizes = (56, 32, 16, 8, 4, 8, 16, 32, 56)
    layers: list[nn.Module] = []
    for inputs, units in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, units), nn.Sigmoid()]
    return nn.Sequential(*layers[:-1]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_deep_net_that_says_nothing_yet_learns(dtype: torch.dtype) -> None:
    """The best constant output has a loss of 79.5; without bounds every step is taken back for ever.

    With bounds of ten times the weights the first hundred steps were mostly taken back.
    """
    model, loss = deep(dtype), qd.Gaussian(1.0)
    rule = qd.Riemannian(model, loss)
    x = torch.randn(500, 56, generator=torch.Generator().manual_seed(1)).to(dtype)
    losses = [train(model, loss, rule, x, x) for _ in range(120)]
    assert rule.auto is not None and rule.auto.retreats < 3
    assert losses[0] > 82 and losses[-1] < 78


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_no_layer_moves_by_many_times_its_own_weights(factor: float) -> None:
    model, loss = deep(torch.float64), qd.Gaussian(1.0)
    rule = qd.Riemannian(model, loss, lr=factor, step="auto", safeguard=None)
    x = torch.randn(200, 56, generator=torch.Generator().manual_seed(1)).double()
    reached = 0.0
    for _ in range(6):
        before = {p: p.detach().clone() for p in model.parameters()}
        train(model, loss, rule, x, x)
        reached = max(reached, *parts(rule, before))
    assert 0.5 < reached / descent.LONGEST < 1.01


def normed() -> nn.Sequential:
    """A network with norms whose weights begin near zero."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (8, 16, 16):
        layers += [nn.Linear(inputs, 16), nn.LayerNorm(16), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(16, 3)).double()
    for layer in linear_layers(model):
        nn.init.normal_(layer.weight, std=0.02)
    return model


def test_in_a_network_with_norms_no_layer_moves_by_much_of_its_own_weights() -> None:
    """Nor do the norms move by more than the others, though their gains are fifty times as large."""
    model, loss = normed(), qd.Categorical()
    rule = qd.Riemannian(model, loss, safeguard=None)
    x, t = batch("categorical", 400, 8, 3)
    norms = [layer for layer in model if isinstance(layer, nn.LayerNorm)]
    reached = [0.0, 0.0]
    for _ in range(4):
        before = {p: p.detach().clone() for p in model.parameters()}
        train(model, loss, rule, x, t)
        own, usual = parts(rule, before, own=True)
        reached[0] = max(reached[0], *own)
        for norm in norms:
            moments = rule.moments(norm)
            assert moments.m00 is not None and moments.m0i is not None and moments.mii is not None
            b, w = ((p - before[p]).detach() for p in (norm.bias, norm.weight))
            form = moments.m00 * b**2 + 2 * moments.m0i.flatten() * b * w
            form = form + moments.mii.flatten() * w**2
            reached[1] = max(reached[1], float(form.mean() / usual) ** 0.5)
    assert all(0.2 < x / descent.NORMED < 1.05 for x in reached)


def test_layers_that_begin_at_zero_move() -> None:
    model, loss = mlp(5, 6, 3), qd.Categorical()
    for p in model.parameters():
        torch.nn.init.zeros_(p)
    rule = qd.Riemannian(model, loss)
    x, t = batch("categorical", 60, 5, 3)
    first = train(model, loss, rule, x, t)
    for _ in range(5):
        last = train(model, loss, rule, x, t)
    assert last < first


def test_directions_that_were_shortened_are_measured_anew(
    monkeypatch: pytest.MonkeyPatch, warm: None
) -> None:
    """The coefficients are the best ones for the directions as they are in the end."""
    x, t = batch("categorical", 60, 5, 3)
    reports = []
    for longest in (1e9, 0.2):
        monkeypatch.setattr(descent, "LONGEST", longest)
        model, loss = mlp(5, 6, 3), qd.Categorical()
        rule = qd.Riemannian(model, loss, metric="exact", step_fraction=1.0, safeguard=None)
        fisher = qd.reference.fisher_categorical(model, x)
        before = {p: p.detach().clone() for p in model.parameters()}
        train(model, loss, rule, x, t)
        moved = torch.cat([(p.detach() - before[p]).flatten() for p in model.parameters()])
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
        predicted = gradient @ moved + 0.5 * moved @ fisher @ moved
        assert rule.auto is not None
        assert rule.auto.predicted == pytest.approx(float(predicted))
        assert rule.auto.steps == 1 and max(parts(rule, before)) <= longest * (1 + 1e-6)
        reports.append(rule.auto)
    assert 0 > reports[1].predicted > reports[0].predicted


@pytest.mark.parametrize("rounds", [2, 3])
def test_steps_after_one_that_was_shortened_are_shortened_alike(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not measured, and no layer goes any further; also where directions were shortened again and again."""
    monkeypatch.setattr(descent, "LONGEST", 0.02)
    monkeypatch.setattr(descent, "ROUNDS", rounds)
    model, loss = mlp(5, 6, 7, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss, averaged=False)
    report, x, t = rule.auto, *batch("categorical", 600, 5, 3)
    assert report is not None
    seen = 0
    for _ in range(16):
        before = {p: p.detach().clone() for p in model.parameters()}
        train(model, loss, rule, x, t)
        found = parts(rule, before)
        if report.stride > 1 and report.shortened:
            seen += 1
            assert max(found) <= 0.02 * 1.1 and max(found) > 0.01
            assert min(report.shortened) >= 1 and max(report.shortened) > 1
    assert seen > 6 and not report.retreats


def test_a_layer_that_was_not_shortened_keeps_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first of three went twice too far, and then none: only its next step is half as long."""
    model, loss = mlp(5, 6, 7, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss, averaged=False)
    report, x, t = rule.auto, *batch("categorical", 600, 5, 3)
    assert report is not None
    first = linear_layers(model)[0].parameters()
    found = iter([dict.fromkeys(first, 2.0), {}])
    monkeypatch.setattr(descent, "_excess", lambda *_: next(found))
    train(model, loss, rule, x, t)
    assert report.shortened == [2.0, 1.0, 1.0] and len(report.proportions) == 3
    moving = [proposal._moving(rule, block, {}, 0.1) for block in rule._blocks]
    lengths = proposal._lengths(rule, moving)
    assert lengths is not None
    one, *others = report.proportions
    assert [*lengths.values()] == pytest.approx([one / 2, *others])


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "unitwise"])
def test_no_factor_leads_beyond_the_bound(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a scheduler raises the ``lr``; without proportions, which the next steps could reuse, each is measured."""
    monkeypatch.setattr(descent, "LONGEST", 0.02)
    model, loss = mlp(5, 6, 7, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss, averaged=False, reduction=reduction)
    report, x, t = rule.auto, *batch("categorical", 600, 5, 3)
    assert report is not None
    strides = []
    for step in range(16):
        rule.param_groups[0]["lr"] = 0.1 if step < 6 else 1.0
        before = {p: p.detach().clone() for p in model.parameters()}
        train(model, loss, rule, x, t)
        strides.append(report.stride)
        if reduction == "quasi-diagonal":
            assert max(parts(rule, before)) <= 0.02 * 1.1
    assert report.shortened and (max(strides) == 1) is (reduction == "unitwise")


@pytest.mark.parametrize(("harm", "back"), [(1e-9, 0), (1e-4, 1)])
def test_what_may_be_rounding_is_no_harm(harm: float, back: int) -> None:
    """Or steps that are short enough would be taken back for ever."""
    model, loss = mlp(5, 6, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss)
    report, x, t = rule.auto, *batch("categorical", 40, 5, 3)
    assert report is not None
    for _ in range(2):
        train(model, loss, rule, x, t)
    bias = model[-1].bias
    (gradient,) = torch.autograd.grad(loss(model(x), t), bias)
    with torch.no_grad():
        for p in model.parameters():
            rule.state[p]["update"].zero_()
        uphill = harm * gradient / gradient.square().sum()
        bias.add_(uphill)
        rule.state[bias]["update"].add_(uphill)
    report.promise = 1e-20
    train(model, loss, rule, x, t)
    assert report.actual == pytest.approx(harm, rel=0.05) and report.retreats == back


def test_retreat_upon_retreat_knows_no_bound() -> None:
    model, loss = mlp(5, 6, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss, lr=0.1, step="auto", step_every=1)
    report, x, t = rule.auto, *batch("categorical", 60, 5, 3)
    assert report is not None
    for _ in range(3):
        train(model, loss, rule, x, t)
    high = quadratic.BOUNDS[3] * report.usual
    for retreats in (1, 2, 3):
        with torch.no_grad():
            for p in model.parameters():
                push(rule, p)
        train(model, loss, rule, x, t)
        assert report.retreats == retreats
        if retreats == 1:
            assert report.damping <= high
        train(model, loss, rule, x, t)
        if retreats > 1:
            continue
        report.trend = 0.0  # nothing good in between
    assert report.damping > 2 * high
    kept = report.damping
    report.trend = -1.0
    train(model, loss, rule, x, t)
    assert kept / 2 == pytest.approx(report.damping)


def test_a_retreat_does_not_use_up_the_turn_of_the_metric(seldom: None) -> None:
    model, loss = mlp(5, 6, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss, lr=0.1, step="auto", metric_every=4, step_every=1)
    x, t = batch("categorical", 60, 5, 3)
    for _ in range(4):
        train(model, loss, rule, x, t)
    home = rule._blocks[0].home
    assert rule.state[home]["updates"] == 1 and rule._collector.due
    with torch.no_grad():
        for p in model.parameters():
            push(rule, p)
    train(model, loss, rule, x, t)
    assert rule.auto is not None and rule.auto.retreats == 1
    assert rule.state[home]["updates"] == 1 and rule._collector.due
    again = qd.Riemannian(mlp(5, 6, 3), loss, lr=0.1, step="auto", metric_every=4)
    again.load_state_dict(rule.state_dict())
    assert again._collector.due
    train(model, loss, rule, x, t)
    assert rule.state[home]["updates"] == 2 and not rule._collector.due


def test_the_metric_is_updated_in_each_of_the_first_steps() -> None:
    model, loss = mlp(5, 6, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss, lr=0.1, step="auto")
    x, t = batch("categorical", 60, 5, 3)
    updates = []
    for _ in range(rhythm.AT_FIRST + 15):
        train(model, loss, rule, x, t)
        updates.append(rule.state[rule._blocks[0].home]["updates"])
    assert rule.auto is not None and rule.auto.retreats == 0
    assert updates == [1, 2, 3, 4, *[4] * 4, *[5] * 8, *[6] * 3]


@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_layer_that_is_alone_finds_weights_of_the_other_sign(inputs: int, seed: int) -> None:
    """What it may move by must not shrink with its weights, or these would never cross zero."""
    torch.manual_seed(seed)
    model, loss = nn.Linear(inputs, 1), qd.Gaussian()
    optimizer = qd.Riemannian(model, loss)
    x = torch.randn(300, inputs)
    t = 2.0 - 3.0 * x.sum(1, keepdim=True) * model.weight.detach().sign()[0, 0]
    for _ in range(150):
        train(model, loss, optimizer, x, t)
    assert float((model(x) - t).detach().abs().max()) < 0.05
