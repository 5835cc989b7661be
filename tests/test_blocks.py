"""The metric of a layer as a quadratic form, against its dense matrix, float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import quasidiag as qd
from nets import batch, mlp
from quasidiag.reductions import safeguarded
from quasidiag.reference import completion


def rule_of(**options: Any) -> qd.Riemannian:
    rule = qd.Riemannian(mlp(4, 5, 3), qd.Categorical(), **options)
    x, t = batch("categorical", 30, 4, 3)
    for _ in range(2):
        rule.zero_grad()
        assert rule.criterion is not None
        rule.criterion(rule.model(x), t).backward()
        rule.step()
    return rule


def dense(rule: qd.Riemannian, unit: int) -> Tensor:
    """The metric of a unit of the first layer, the bias first."""
    block, state = rule._blocks[0], rule.state
    if rule.reduction == "unitwise":
        return state[block.home]["block"][unit]
    m00, m0i, mii = block.kept(state)
    assert m00 is not None and mii is not None
    if m0i is None:
        unit_, layer, dead = rule.safeguard or (0.0, 0.0, 0.0)
        bounded = mii[unit] + unit_ * mii[unit].mean() + layer * mii.mean()
        return torch.diag(torch.cat([m00[unit : unit + 1] + dead * m00.mean(), bounded]))
    if rule.safeguard is not None:
        m00, mii = safeguarded(m00, m0i, mii, *rule.safeguard)
    back = torch.eye(1 + mii.shape[1], dtype=torch.float64)
    back[1:, 0] = state[block.home]["shift"]
    return back @ completion(torch.cat([m00[unit : unit + 1], mii[unit]]), m0i[unit]) @ back.T


@pytest.mark.parametrize("safeguard", ["default", None])
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
def test_products_of_steps_in_the_metric(reduction: str, safeguard: str | None) -> None:
    rule = rule_of(reduction=reduction, safeguard=safeguard)
    block = rule._blocks[0]
    random = torch.Generator().manual_seed(0)
    shapes = [p.shape for p in block.parameters]
    steps = [
        [torch.randn(s, generator=random, dtype=torch.float64) for s in shapes] for _ in range(3)
    ]
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for unit in range(5):
        rows = torch.stack([torch.cat([b[unit : unit + 1], w[unit]]) for b, w in steps])
        expected += rows @ dense(rule, unit) @ rows.T
    torch.testing.assert_close(block.forms(rule.state, steps), expected)


def test_the_root_is_kept_until_the_metric_changes() -> None:
    rule = rule_of()
    block, state = rule._blocks[0], rule.state
    root = block.root(state)
    assert block.root(state) is root
    other = qd.Riemannian(mlp(4, 5, 3), qd.Categorical())
    saved = rule.state_dict()
    other.load_state_dict(saved)
    torch.testing.assert_close(other._blocks[0].root(other.state).scale, root.scale)
    state[block.home]["mii"].mul_(4.0)
    assert not torch.allclose(block.root(state).scale, root.scale)
    root = block.root(state)
    rule.load_state_dict(saved)
    assert block.root(rule.state) is not root
