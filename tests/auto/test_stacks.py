"""Layers of one shape, one upon the other: the same as each alone, float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto import stacks
from quasidiag.auto.directions import products
from quasidiag.auto.stacks import Stack, Stacks, in_order
from quasidiag.blocks import DiagonalBlock


class Block(nn.Module):
    """Two dense layers and a norm, added to what comes in."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 9, bias=bias)
        self.down = nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def deep(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(bias=i != 1) for i in range(layers)]
    return nn.Sequential(nn.Linear(5, 6), *blocks, nn.Linear(6, 3)).double()


def trained(model: nn.Module, steps: int = 6, **options: Any) -> qd.Riemannian:
    optimizer = qd.Riemannian(model, qd.Categorical(), **options)
    for seed in range(steps):
        train(optimizer, seed)
    return optimizer


def train(optimizer: qd.Riemannian, seed: int) -> None:
    x, t = batch("categorical", 40, 5, 3, seed=seed)
    optimizer.zero_grad()
    assert optimizer.criterion is not None
    optimizer.criterion(optimizer.model(x), t).backward()
    optimizer.step()


def groups(optimizer: qd.Riemannian) -> list[list[str]]:
    found = optimizer._stacks.of(optimizer._blocks, optimizer.state, optimizer.foreach)
    return sorted(sorted(block.name for block in stack.blocks) for stack in found)


def test_layers_of_one_shape_go_together() -> None:
    assert groups(trained(deep())) == [
        ["0"],
        ["1.down", "2.down", "3.down", "4.down"],
        ["1.norm", "2.norm", "3.norm", "4.norm"],
        ["1.up", "3.up", "4.up"],
        ["2.up"],
        ["5"],
    ]


def test_unless_they_are_large_or_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stacks.LARGEST, "cpu", 10)
    names = [["0"], *([f"{i}.{x}"] for i in range(1, 5) for x in ("down", "up")), ["5"]]
    norms = ["1.norm", "2.norm", "3.norm", "4.norm"]
    assert groups(trained(deep())) == sorted([*names, norms])
    assert len(groups(trained(deep(), foreach=True))) == 6
    assert all(len(group) == 1 for group in groups(trained(deep(), foreach=False)))


class Mixed(nn.Module):
    """Layers of several kinds whose units see as many inputs, in one order or the other."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.Conv2d(6, 6, 1), nn.Bilinear(2, 3, 6), nn.Linear(6, 6)]
        self.layers = nn.ModuleList(layers[::-1] if turned else layers)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if isinstance(layer, nn.Bilinear):
                y = layer(x[:, :2], x[:, 2:5])
            elif isinstance(layer, nn.Conv2d):
                y = layer(x[..., None, None]).flatten(1)
            else:
                y = layer(x)
            x = torch.tanh(x + y)
        return self.last(x)


MODELS: dict[str, Any] = {
    "deep": deep,
    "mixed": lambda: Mixed(False),
    "mixed, turned": lambda: Mixed(True),
}


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
@pytest.mark.parametrize("safeguard", ["default", None])
@pytest.mark.parametrize("name", list(MODELS))
def test_training_is_the_same_with_and_without(reduction: str, safeguard: Any, name: str) -> None:
    found = []
    for foreach in (False, None, True):
        options: dict[str, Any] = dict(reduction=reduction, safeguard=safeguard, foreach=foreach)
        optimizer = trained(MODELS[name](), 12, **options)
        found.append([p.detach() for p in optimizer.model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-8)


def of(optimizer: qd.Riemannian, name: str) -> DiagonalBlock:
    return next(block for block in optimizer._blocks if block.name == name)


def test_a_stack_is_its_layers() -> None:
    optimizer = trained(deep())
    state = optimizer.state
    for stack in optimizer._stacks.of(optimizer._blocks, state):
        steps = [[[torch.randn_like(p) for p in b.parameters] for b in stack.blocks] for _ in "ab"]
        for back, step in zip(stack.like(stack.rows(steps[0])), steps[0], strict=True):
            torch.testing.assert_close(back, step)
        for i, block in enumerate(stack.blocks):
            alone = Stack([block])
            torch.testing.assert_close(stack.strengths(state)[i], alone.strengths(state)[0])
            form = alone.forms(state, [[step[i]] for step in steps])
            torch.testing.assert_close(stack.forms(state, steps)[i], form[0])


def test_a_layer_of_which_a_part_is_frozen_leaves_its_stack() -> None:
    optimizer = trained(deep(), 3)
    of(optimizer, "3.up").parameters[0].requires_grad_(False)
    frozen = of(optimizer, "3.up").parameters[0].clone()
    twin = copy.deepcopy(optimizer)
    twin.foreach = False
    for seed in range(3, 12):
        train(optimizer, seed)
        train(twin, seed)
    torch.testing.assert_close(of(optimizer, "3.up").parameters[0], frozen, rtol=0.0, atol=0.0)
    for p, q in zip(optimizer.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_the_root_is_kept_until_the_metric_changes() -> None:
    rule = trained(mlp(5, 6, 3), 2)
    (stack,) = rule._stacks.of(rule._blocks[:1], rule.state)
    root = stack.root(rule.state)
    assert stack.root(rule.state) is root
    other = qd.Riemannian(mlp(5, 6, 3), qd.Categorical())
    saved = copy.deepcopy(rule.state_dict())
    other.load_state_dict(saved)
    (same,) = other._stacks.of(other._blocks[:1], other.state)
    torch.testing.assert_close(same.root(other.state).scale, root.scale)
    rule.state[rule._blocks[0].home]["mii"].mul_(4.0)
    assert not torch.allclose(stack.root(rule.state).scale, root.scale)
    rule.load_state_dict(saved)
    torch.testing.assert_close(stack.root(rule.state).scale, root.scale)
    rule.state[rule._blocks[0].home]["shift"].add_(1.0)
    assert root.mean is not None
    torch.testing.assert_close(stack.root(rule.state).mean, root.mean + 1.0)


def test_what_no_step_uses_is_let_go() -> None:
    optimizer = trained(deep(), 5)
    every, kept = optimizer._blocks, Stacks()
    first = kept.of(every, optimizer.state)
    kept.sweep()
    assert all(a is b for a, b in zip(kept.of(every, optimizer.state), first, strict=True))
    kept.sweep()
    kept.of(every[:3], optimizer.state)
    kept.sweep()
    kept.sweep()  # a step that was none
    assert {block for group in kept._kept for block in group} == {*every[:3]}


def test_numbers_come_back_in_the_order_that_was_asked_for() -> None:
    optimizer = trained(deep())
    blocks = optimizer._blocks[::-1]
    found = optimizer._stacks.of(blocks, optimizer.state)
    place = {block: float(i) for i, block in enumerate(optimizer._blocks)}
    numbers = [torch.tensor([place[block] for block in stack.blocks]) for stack in found]
    expected = [float(i) for i in range(len(blocks))][::-1]
    assert in_order(blocks, found, numbers).tolist() == expected


def test_the_way_is_not_a_part_of_a_stack() -> None:
    """Or each would keep all of them alive, and a checkpoint would hold them many times."""
    optimizer = trained(deep())
    kept = [
        x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)
    ]
    assert len(kept) > 100 and all(x._base is None for x in kept)


def test_inner_products_of_many_tensors_are_those_of_each_pair() -> None:
    """In their order, whatever sizes and types are multiplied together."""
    shapes: list[tuple[int, ...]] = [(3, 4), (12,), (5,), (), (2, 6), (200, 100), (5,), (0,), (0,)]
    generator = torch.Generator().manual_seed(0)
    us, vs = (
        [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(2)
    )
    us[4], vs[4] = us[4].float(), vs[4].float()
    found = products(us, vs)
    assert found == pytest.approx([float((u * v).sum()) for u, v in zip(us, vs)], rel=1e-6)
