"""How often the metric is updated and the model measured: early and late, where curvature is common and where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quasidiag as qd
from nets import batch, digits, mlp
from quasidiag.auto import rhythm
from quasidiag.auto.quadratic import FORMS, QuadraticModel
from quasidiag.auto.report import Report
from quasidiag.auto.rhythm import AT_FIRST, METRIC, MODEL, SELDOM

STEPS, LATER = 80, 24


def measured(common: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    """The steps that measured the model, and those that updated the metric, with curvature common to such an extent."""
    monkeypatch.setattr(rhythm, "LATER", LATER)
    monkeypatch.setattr(Report, "common", common)
    model, loss = mlp(5, 6, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss, lr=0.02, step="auto", **options)
    x, t = batch("categorical", 60, 5, 3)
    models, updates = [], [0]
    for step in range(STEPS):
        rule.zero_grad()
        loss(model(x), t).backward()
        rule.step()
        assert rule.auto is not None and rule.auto.retreats == 0
        models += [step] if rule.auto.stride == 1 else []
        updates.append(rule.state[rule._blocks[0].home]["updates"])
    return models, np.flatnonzero(np.diff(updates)).tolist()


FIRST = [*range(AT_FIRST)]


@pytest.mark.parametrize("common", [0.5, 1.0])
def test_in_every_few_steps_where_curvature_is_common(
    common: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, metrics = measured(common, monkeypatch)
    assert models == [*FIRST, *range(FIRST[-1] + MODEL, STEPS, MODEL)]
    assert metrics == [*FIRST, *range(METRIC, STEPS, METRIC)]


@pytest.mark.parametrize("common", [0.0, 0.4])
def test_more_seldom_later_where_it_is_not(common: float, monkeypatch: pytest.MonkeyPatch) -> None:
    models, metrics = measured(common, monkeypatch)
    early, seldom = [*range(FIRST[-1] + MODEL, LATER, MODEL)], SELDOM[0] * MODEL
    assert models == [*FIRST, *early, *range(early[-1] + seldom, STEPS, seldom)]
    seldom = SELDOM[1] * METRIC
    assert metrics == [*FIRST, *range(METRIC, LATER, METRIC), *range(2 * seldom, STEPS, seldom)]


def test_what_is_asked_for_holds_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    models, metrics = measured(0.0, monkeypatch, step_every=5, metric_every=4)
    assert models == [*FIRST, *range(FIRST[-1] + 5, STEPS, 5)]
    assert metrics == [*FIRST, *range(4, STEPS, 4)]


def test_the_metric_looks_back_over_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rhythm, "LATER", 0)
    rule = qd.Riemannian(mlp(5, 6, 3), qd.Categorical())
    assert 1 - rhythm.weight(rule, 0.1) == pytest.approx((1 - 0.1) ** SELDOM[1])
    often = qd.Riemannian(mlp(5, 6, 3), qd.Categorical(), metric_every=16)
    monkeypatch.setattr(Report, "common", 1.0)
    assert rhythm.weight(rule, 0.1) == pytest.approx(0.1) and rhythm.weight(often, 0.1) == 0.1


def test_that_weight_is_the_one_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = qd.Riemannian(mlp(5, 6, 3), qd.Categorical())
    monkeypatch.setattr(rule, "auto", Report(steps=rhythm.LATER))
    block = rule._blocks[0]
    rule.state[block.home]["updates"] = 1000
    assert rule._gamma(block) == pytest.approx(0.19)
    assert rhythm.LATER == 100 and (rhythm.step_every(rule), rhythm.metric_every(rule)) == (18, 16)


@pytest.mark.parametrize("kind", ["autoencoder", "classifier"])
def test_the_echo_tells(kind: str) -> None:
    """Minibatches of an autoencoder have their curvature in common, those of a classifier each its own."""
    torch.manual_seed(0)
    x, labels = (of.float() if of.is_floating_point() else of for of in digits())
    layers = [nn.Linear(784, 50), nn.Tanh(), nn.Linear(50, 784 if kind == "autoencoder" else 10)]
    model = nn.Sequential(*layers)
    loss, t = (qd.Gaussian(), x) if kind == "autoencoder" else (qd.Categorical(), labels)
    rule = qd.Riemannian(model, loss)
    for _ in range(rhythm.LATER + 1):
        i = torch.randperm(len(x))[:500]
        rule.zero_grad()
        loss(model(x[i]), t[i]).backward()
        rule.step()
    assert rhythm.step_every(rule) == (6 if kind == "autoencoder" else 18)


@pytest.mark.parametrize(("stride", "age"), [(0, 1), (1, 1), (MODEL, 1), (3 * MODEL, 3)])
def test_old_forms_count_less_after_many_steps(stride: int, age: int) -> None:
    names, one, old, new = ["new"], np.ones(1), np.full((1, 1), 4.0), np.full((1, 1), 2.0)
    model = QuadraticModel(None, None, Report(steps=1000, stride=stride))  # type: ignore[arg-type]
    np.testing.assert_allclose(model._averaged(names, old, one), old)
    expected = FORMS**age * old + (1 - FORMS**age) * new
    np.testing.assert_allclose(model._averaged(names, new, one), expected)
