"""The metric of a layer as a quadratic form, against its dense matrix, float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
        full = state[block.home]["block"]
        if rule.safeguard is None:
            return full[unit]
        raw = [full[:, 0, 0], full.diagonal(dim1=1, dim2=2)[:, 1:]]
        found = safeguarded(raw[0], full[:, 0, 1:], raw[1], *rule.safeguard)
        more = [(x - y)[unit].flatten() for x, y in zip(found, raw)]
        return full[unit] + torch.diag(torch.cat(more))
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
    (stack,) = rule._stacks.of([block], rule.state)
    found = stack.forms(rule.state, [[step] for step in steps])
    torch.testing.assert_close(found, expected.unsqueeze(0))


@pytest.mark.parametrize("kind", ["linear", "convolution", "norm"])
@pytest.mark.parametrize("left", ["weight", "bias"])
def test_layers_of_which_only_a_part_is_trained(kind: str, left: str) -> None:
    torch.manual_seed(0)
    layers = {
        "linear": nn.Linear(9, 9),
        "convolution": nn.Sequential(nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 9, 3), nn.Flatten()),
        "norm": nn.LayerNorm(9),
    }
    model = nn.Sequential(layers[kind], nn.Linear(9, 3))
    for name, p in model[0].named_parameters():
        p.requires_grad_(name.endswith(left))
    loss = qd.Categorical()
    rule = qd.Riemannian(model, loss)
    x, t = torch.randn(40, 9), torch.randint(3, (40,))
    losses = []
    for _ in range(30):
        rule.zero_grad()
        value = loss(model(x), t)
        value.backward()
        rule.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0] and rule.auto is not None and rule.auto.length > 0


def test_a_constant_input_beside_a_frozen_bias() -> None:
    """The diagonal that is left moves the weights of an input that has never varied; in the metric that is no length."""
    model, loss = mlp(4, 5, 3), qd.Categorical()
    rule = qd.Riemannian(model, loss, safeguard=None)
    x, t = batch("categorical", 40, 4, 3)
    x[:, 1] = 1.0
    for step in range(30):
        if step == 15:
            model[0].bias.requires_grad_(False)
        before = model[2].weight.detach().clone()
        rule.zero_grad()
        loss(model(x), t).backward()
        rule.step()
        assert rule.auto is not None and rule.auto.retreats == 0
        assert not torch.equal(model[2].weight, before)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_safeguard_of_a_convolution_without_bias_goes_by_its_channels(transposed: bool) -> None:
    """Oracle: the same convolution as a matrix, units by inputs."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(2, 3, 2, bias=False).double()
    model, loss = nn.Sequential(layer, nn.Flatten()), qd.Gaussian()
    optimizer = qd.Riemannian(model, loss, lr=0.0, safeguard=(0.1, 0.01, 0.2))
    x = torch.randn(8, 2, 4, 4, dtype=torch.float64)
    y = model(x)
    loss(y, torch.zeros_like(y)).backward()
    optimizer.step()
    (block,), state = optimizer._blocks, optimizer.state
    (kept,) = (m for m in block.kept(state) if m is not None)
    units = kept.transpose(0, 1) if transposed else kept
    more = 0.1 * units.flatten(1).mean(1) + 0.01 * units.mean()
    expected = units + more.view(-1, 1, 1, 1)
    (found,) = block._bounded(block.kept(state))
    torch.testing.assert_close(found, expected.transpose(0, 1) if transposed else expected)
