"""Param groups in any spelling, each with its own hyperparameters; groups added late; layers that thaw."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, problem, train, values
from torch import nn

import quasidiag as qd

SPELLINGS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda model: list(model.parameters()),
    "generator": lambda model: (p for p in model.parameters()),
    "named": lambda model: model.named_parameters(),
    "groups": lambda model: [
        {"params": model[0].parameters()},
        {"params": list(model[2].parameters())},
    ],
    "one tensor": lambda model: [{"params": p} for p in model.parameters()],
    "named groups": lambda model: [
        {"params": model[0].named_parameters("0")},
        {"params": model[2].named_parameters("2")},
    ],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_any_spelling(spelling: str) -> None:
    expected, loss, x, t = problem()
    train(expected, loss, qd.QDOP(expected, loss, lr=0.05), x, t, 3)
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05, params=SPELLINGS[spelling](model))
    train(model, loss, optimizer, x, t, 3)
    assert_same(values(model), values(expected))
    if spelling.startswith("named"):
        assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


def test_no_parameters_at_all() -> None:
    model, loss, _, _ = problem()
    with pytest.raises(ValueError, match="empty"):
        qd.QDOP(model, loss, lr=0.05, params=[])


def test_each_group_has_its_own_numbers() -> None:
    model, loss, x, t = problem()
    groups = [
        {"params": model[0].parameters(), "lr": 0.0, "gamma": 0.5},
        {"params": model[2].parameters(), "eps": 1e-3, "momentum": 0.5, "weight_decay": 0.1},
    ]
    optimizer = qd.QDOP(model, loss, lr=0.05, params=groups)
    before = values(model)
    train(model, loss, optimizer, x, t, 2)
    assert_same(before[:2], values(model)[:2], 0.0)
    assert "momentum" in optimizer.state[model[2].weight]
    assert "momentum" not in optimizer.state[model[0].weight]
    first = problem()[0]
    other = qd.QDOP(first, loss, lr=0.0, gamma=0.5)
    train(first, loss, other, x, t)
    one = other.moments(first[0]).m00.clone()
    # The second minibatch weighs a half: so does what came before.
    optimizer2 = qd.QDOP(problem()[0], loss, lr=0.0, gamma=0.5)
    train(optimizer2.model, loss, optimizer2, 2 * x, t)
    train(optimizer2.model, loss, optimizer2, x, t)
    alone = qd.QDOP(problem()[0], loss, lr=0.0)
    train(alone.model, loss, alone, 2 * x, t)
    expected = 0.5 * alone.moments(alone.model[0]).m00 + 0.5 * one
    torch.testing.assert_close(optimizer2.moments(optimizer2.model[0]).m00, expected)


@pytest.mark.parametrize("kind", METRICS[:3])
def test_a_group_added_late_is_trained_with_its_own_metric(kind: str) -> None:
    model, loss, x, t = problem()
    model[0].requires_grad_(False)
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    train(model, loss, optimizer, x, t, 2)
    with pytest.raises(KeyError):
        optimizer.moments(model[0])
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    before = values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, loss, optimizer, x, t, 2)
    assert_moved(before[:2], model[0])
    assert optimizer.moments(model[0]).mii.shape == model[0].weight.shape
    optimizer.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_a_bias_that_thaws_joins_its_block() -> None:
    model, loss, x, t = problem()
    model[0].bias.requires_grad_(False)
    optimizer = qd.QDOP(model, loss, lr=0.05, momentum=0.5)
    train(model, loss, optimizer, x, t, 2)
    buffer = optimizer.state[model[0].weight]["momentum"].clone()
    assert optimizer.moments(model[0]).m0i is None
    model[0].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model[0].bias]})
    assert torch.equal(optimizer.state[model[0].weight]["momentum"], buffer)
    before = values(model)
    train(model, loss, optimizer, x, t, 2)
    assert optimizer.moments(model[0]).m0i is not None
    assert_moved([before[1]], nn.ParameterList([model[0].bias]))


def test_a_layer_frozen_later_stays_put() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05, momentum=0.9)
    train(model, loss, optimizer, x, t, 2)
    model[0].requires_grad_(False)
    before = values(model)
    train(model, loss, optimizer, x, t, 2)
    assert_same(before[:2], values(model)[:2], 0.0)
    assert_moved(before, model)


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "unitwise", "diagonal"])
def test_a_weight_frozen_later_leaves_its_bias_alone(reduction: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.05, reduction=reduction)
    train(model, loss, optimizer, x, t, 2)
    model[2].weight.requires_grad_(False)
    before = values(model)
    optimizer.zero_grad()
    loss(model(x), t).backward()
    gradient = model[2].bias.grad.clone()
    optimizer.step()
    step = gradient / (optimizer.moments(model[2]).m00 + 1e-8)
    torch.testing.assert_close(model[2].bias.detach(), before[3] - 0.05 * step)
    assert torch.equal(model[2].weight, before[2])


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    for group, error in (
        ({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}, TypeError),
        ({"params": [nn.Parameter(torch.zeros(2))], "lr": -1.0}, ValueError),
        ({"params": [nn.Parameter(torch.zeros(2))], "gamma": float("nan")}, ValueError),
        ({"params": [nn.Parameter(torch.zeros(2))], "eps": "1e-8"}, TypeError),
        ({"params": [nn.Parameter(torch.zeros(2))], "eps": torch.zeros(2)}, TypeError),
        ({"params": list(model[0].parameters())}, ValueError),
    ):
        with pytest.raises(error):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    train(model, loss, optimizer, x, t)


def test_what_thaws_and_is_in_no_group_is_named_once() -> None:
    model, loss, x, t = problem()
    model[0].requires_grad_(False)
    optimizer = qd.QDOP(model, loss, lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, loss, optimizer, x, t)
    model[0].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"^0\.weight: .*add_param_group"):
        train(model, loss, optimizer, x, t)
    model[0].bias.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"^0\.bias: .*not trained"):
        train(model, loss, optimizer, x, t)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0].zero_grad()
        train(model, loss, optimizer, x, t)
        model[0].zero_grad()
        optimizer.add_param_group({"params": model[0].parameters()})
        before = values(model)
        train(model, loss, optimizer, x, t)
    assert_moved(before[:2], model[0])


def test_what_thaws_is_named_even_where_nothing_else_has_a_gradient() -> None:
    model, loss, x, t = problem()
    model[0].requires_grad_(False)
    optimizer = qd.QDOP(model, loss, lr=0.05)
    model[2].requires_grad_(False)
    model[0].requires_grad_(True)
    loss(model(x), t).backward()
    with (
        pytest.warns(UserWarning, match=r"0\.weight, 0\.bias: .*add_param_group"),
        pytest.raises(RuntimeError, match="without a gradient"),
    ):
        optimizer.step()


def test_a_criterion_s_parameter_that_thaws() -> None:
    model, x = problem()[0], problem()[2]
    loss = qd.LearnedGaussian(3).double().requires_grad_(False)
    optimizer = qd.QDOP(model, loss, lr=0.05)
    loss.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"criterion\.log_std"):
        train(model, loss, optimizer, x, x[:, :3])


def test_who_chose_the_params_is_not_told_of_the_others() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05, params=model[2].parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, loss, optimizer, x, t, 2)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("when", ["before the backward pass", "after it"])
@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.05, "momentum": 0.9}, {"lr": 0.05, "weight_decay": 0.1}], ids=str
)
def test_what_is_frozen_does_not_move_by_what_is_left_of_its_gradient(
    options: dict[str, Any], when: str
) -> None:
    """``zero_grad(set_to_none=False)`` leaves zeros, and what gradients are averaged into would go on."""
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, **options)
    train(model, loss, optimizer, x, t, 6)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        model[0].requires_grad_(when == "after it")
        loss(model(x), t).backward()
        model[0].requires_grad_(False)
        before = values(model[0])
        optimizer.step()
        assert_same(before, values(model[0]), 0.0)
    model[0].requires_grad_()
    train(model, loss, optimizer, x, t, 3)
    assert_moved(before, model[0])


@pytest.mark.parametrize("sharing", ["expand", "exact", "reduce"])
def test_a_group_added_before_a_step_needs_another_backward_pass(sharing: str) -> None:
    """What was recorded for the old layers is gone, and the message says what to do."""
    model, loss, x, t = problem()
    model[0].requires_grad_(False)
    optimizer = qd.QDOP(model, loss, lr=0.05, sharing=sharing)
    train(model, loss, optimizer, x, t)
    loss(model(x), t).backward()
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(RuntimeError, match="the metric saw no loss"):
        optimizer.step()
    train(model, loss, optimizer, x, t)
