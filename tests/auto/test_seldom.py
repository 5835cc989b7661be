"""The metric is not updated at every step, and a layer may have its first gradient at any of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, mlp

pytestmark = pytest.mark.usefixtures("seldom")

RULES: dict[str, dict[str, Any]] = {
    "automatic": {"step": "auto", "lr": 0.1, "metric_every": 4},
    "automatic, unitwise": {
        "step": "auto",
        "lr": 0.1,
        "metric_every": 4,
        "reduction": "unitwise",
    },
    "fixed": {"lr": 0.01, "metric_every": 4},
    "fixed, one by one": {"lr": 0.01, "metric_every": 4, "foreach": False},
    "fixed, unitwise": {"lr": 0.01, "metric_every": 4, "reduction": "unitwise"},
}


class Heads(nn.Module):
    """Two heads, one at a time, on a trunk or without one."""

    def __init__(self, trunk: bool = True) -> None:
        super().__init__()
        self.trunk = mlp(4, 6) if trunk else nn.Identity()
        inputs = 6 if trunk else 4
        self.heads = nn.ModuleList([mlp(inputs, 3), mlp(inputs, 3, seed=1)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x).tanh())


def one_step(model: nn.Module, loss: nn.Module, rule: Any, t: Tensor, *x: Any) -> None:
    rule.zero_grad()
    loss(model(*x), t).backward()
    rule.step()


@pytest.mark.parametrize("trunk", [True, False])
@pytest.mark.parametrize("name", list(RULES))
def test_heads_in_turn(name: str, trunk: bool) -> None:
    """The second is never there when the metric is due; it waits for the first step that is due on its behalf."""
    model, loss = Heads(trunk), qd.Categorical()
    x, t = batch("categorical", 24, 4, 3)
    optimizer = qd.Riemannian(model, loss, **RULES[name])
    second = copy.deepcopy(model.heads[1])
    for step in range(4):
        before = [p.clone() for p in model.heads[1].parameters()]
        one_step(model, loss, optimizer, t, x, step % 2)
        moved = any(not torch.equal(p, q) for p, q in zip(model.heads[1].parameters(), before))
        assert moved == (step == 3)
    assert optimizer._started(optimizer._owner[model.heads[1][0]])
    assert not torch.equal(model.heads[1][0].weight, second[0].weight)
    for step in range(4, 12):  # and from then on, the metric is updated as seldom as it was to be
        taken = step if optimizer.auto is None else optimizer.auto.steps
        assert optimizer._collector.due == (taken % 4 == 0)
        one_step(model, loss, optimizer, t, x, step % 2)


@pytest.mark.parametrize("name", list(RULES))
def test_a_layer_that_thaws_between_updates(name: str) -> None:
    model, loss = mlp(4, 6, 3), qd.Categorical()
    x, t = batch("categorical", 24, 4, 3)
    optimizer = qd.Riemannian(model, loss, **RULES[name])
    model[0].requires_grad_(False)
    for step in range(8):
        if step == 5:
            model[0].requires_grad_(True)
        before = model[0].weight.detach().clone()
        one_step(model, loss, optimizer, t, x)
        assert torch.equal(model[0].weight, before) == (step < 6)


@pytest.mark.parametrize("name", list(RULES))
def test_a_first_minibatch_that_is_not_finite(name: str) -> None:
    """Is skipped; the next one takes its place in the metric."""
    model, loss = mlp(4, 6, 3), qd.Categorical()
    x, t = batch("categorical", 24, 4, 3)
    optimizer = qd.Riemannian(model, loss, **RULES[name])
    with pytest.warns(RuntimeWarning, match="skipped"):
        one_step(model, loss, optimizer, t, x * torch.nan)
    before = [p.clone() for p in model.parameters()]
    one_step(model, loss, optimizer, t, x)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_a_gradient_without_a_metric_is_left_out_of_the_preconditioned() -> None:
    model, loss = Heads(), qd.Categorical()
    x, t = batch("categorical", 24, 4, 3)
    rule = qd.Riemannian(model, loss, lr=1.0, metric_every=4)
    for head in (0, 1):
        rule.zero_grad()
        loss(model(x, head), t).backward()
        rule.precondition_()
    assert all(not p.grad.any() for p in model.heads[1].parameters())
    assert all(p.grad.any() for p in model.trunk.parameters())
