"""Averaged gradients and moves, compiled, against the plain code in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import averages
from quasidiag.auto import moving, rest
from quasidiag.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")

SIZES = [(3,), (90, 261), (1, 1), (0, 5), (70, 300)]


def some(seed: int, sizes: list[tuple[int, ...]] = SIZES) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=g) for size in sizes]


@pytest.mark.parametrize("steps", [1, 3, 400])
def test_averages(steps: int, calls: list[str]) -> None:
    """The first are divided by the weights that there are."""
    states: list[dict[str, Any]] = [{} for _ in SIZES]
    exact: list[dict[str, Any]] = [{} for _ in SIZES]
    for step in range(steps):
        given = some(step)
        got = averages(states, given, 0.1)
        want = averages(exact, [g.double() for g in given], 0.1)
    assert calls.count("qd_average") == steps
    for mine, theirs, x, y in zip(states, exact, got, want, strict=True):
        torch.testing.assert_close(mine["average"].double(), theirs["average"], rtol=0, atol=1e-6)
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5)


def taken(dtype: torch.dtype, averaged: bool = True) -> list[list[Tensor]]:
    """Where parameters are after moves of which some have nothing that follows them, and what follows the others."""
    model = nn.ParameterList([nn.Parameter(p.to(dtype)) for p in some(0) if p.numel()])
    still = nn.Parameter(torch.zeros(2, dtype=dtype))
    groups = [{"params": [*model]}, {"params": [still], "lr": 0.0}]
    model.append(still)
    with pytest.warns(UserWarning, match="AdaGrad"):
        optimizer = qd.Riemannian(model, qd.Gaussian(), params=groups, averaged=averaged)
    assert optimizer.auto is not None
    with torch.no_grad():
        for step in range(1, 5):
            optimizer.auto.steps = 20 * (step - 1)  # averaging begins with the second
            ws = some(step, [tuple(p.shape) for p in model])
            moved = dict(zip(model, [w.to(dtype) for w in ws]))
            if step == 1:
                moved.pop(model[1])
            if step == 3:
                optimizer.state[model[0]].pop("update")
            moving.move_(optimizer, moved, -0.3)
    states = [optimizer.state[p] for p in model]
    assert "apart" not in states[-1] and ("apart" in states[0]) == averaged
    follow = [[s[key] for s in states if key in s] for key in ("apart", "update")]
    return [[p.detach() for p in model], *follow]


@pytest.mark.parametrize("averaged", [True, False])
def test_moves(averaged: bool, calls: list[str]) -> None:
    got = taken(torch.float32, averaged)
    assert calls.count("qd_move") == 4
    for found, exact in zip(got, taken(torch.float64, averaged), strict=True):
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("averaged", [True, False])
def test_a_parameter_of_another_shape_is_an_error(averaged: bool) -> None:
    """And not a kernel's that writes where nothing is."""
    model, grown = (nn.Sequential(nn.Linear(20, h), nn.Linear(h, 3)) for h in (30, 3000))
    x, t, loss = torch.randn(100, 20), torch.randint(3, (100,)), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, averaged=averaged)
    for step in range(7):
        if step == 6:
            for p, q in zip(model.parameters(), grown.parameters()):
                p.data = q.data
        optimizer.zero_grad()
        loss(model(x), t).backward()
        if step < 6:
            optimizer.step()
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()


def test_a_graph_that_a_move_made_stale_is_noticed() -> None:
    """A kernel writes past autograd, which must know of it all the same."""
    model = nn.Linear(70, 80)
    optimizer = qd.Riemannian(model, qd.Gaussian())
    y = model(torch.randn(3, 70, requires_grad=True)).square().sum()
    with torch.no_grad():
        move = {model.weight: torch.ones_like(model.weight)}
        moving.move_(optimizer, move, 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_what_is_kept_of_a_move_is_not_part_of_a_stack() -> None:
    """Or all of the stack would stay in memory."""
    model = nn.Linear(70, 80)
    optimizer = qd.Riemannian(model, qd.Gaussian())
    stack = torch.ones(2, 80, 70)
    with torch.no_grad():
        moving.move_(optimizer, {model.weight: stack[1]}, 0.1)
    state = optimizer.state[model.weight]
    assert state["update"]._base is None and rest.keep(optimizer) == 0
    torch.testing.assert_close(state["update"], torch.full((80, 70), 0.1))


def test_a_move_that_comes_to_rest_at_once(calls: list[str]) -> None:
    """As the move, and then the rest, to the bit; and it is left as it was from there on."""
    found = []
    for settles in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 3))
        optimizer = qd.Riemannian(model, qd.Gaussian())
        assert optimizer.auto is not None
        optimizer.auto.steps = 50
        with torch.no_grad():
            for step in range(3):
                moved = dict(
                    zip(
                        model.parameters(), some(step, [tuple(p.shape) for p in model.parameters()])
                    )
                )
                moving.move_(optimizer, moved, 0.1, settles and step > 0)
                ahead = [optimizer.state[p]["ahead"] for p in model.parameters()]
                assert not any(ahead) if settles and step > 0 else all(ahead)
                rest.settle_(optimizer)
                found.append([p.detach().clone() for p in model.parameters()])
                found.append([optimizer.state[p]["apart"].clone() for p in model.parameters()])
                found.append([torch.tensor(optimizer.state[p]["norm"]) for p in model.parameters()])
                rest.lead_(optimizer)
                assert all(optimizer.state[p]["apart"].any() for p in model.parameters())
    half = len(found) // 2
    for mine, theirs in zip(found[:half], found[half:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    assert calls.count("qd_move") == 10 and calls.count("qd_lead") == 6


def test_rest_is_as_by_the_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of parameters that somebody has changed in between, which stay where they were put."""
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 3))
        optimizer = qd.Riemannian(model, qd.Gaussian())
        for p in model.parameters():
            optimizer.state[p] |= {"apart": torch.randn_like(p), "ahead": True, "mark": 1}
        with monkeypatch.context() as patch, torch.no_grad():
            if not compiled:
                patch.setattr(native, "dense", lambda *tensors: False)
            rest.settle_(optimizer)
            model[0].weight.data[3, 5] += 1e-2
            model[1].bias.data.fill_(torch.nan)
            rest.lead_(optimizer)
        states = [optimizer.state[p] for p in model.parameters()]
        assert ["mark" in s for s in states] == [False, True, True, False]
        assert [bool(s["apart"].any()) for s in states] == [False, True, True, False]
        found.append([p.detach().clone() for p in model.parameters()])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_products_of_pairs() -> None:
    xs, ys = some(0), some(1)
    found = native.dots(xs, ys)
    assert found == pytest.approx(
        [float((x.double() * y.double()).sum()) for x, y in zip(xs, ys)], rel=1e-5
    )
    assert native.dots(xs, [y.double() for y in ys]) is None
