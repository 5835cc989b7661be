"""What ``step="auto"`` cannot follow is refused before anything moves; and the last update is what was moved by."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import quasidiag as qd
from nets import batch, mlp


def problem() -> tuple[nn.Sequential, qd.OutputModel, Tensor, Tensor]:
    return mlp(4, 6, 3), qd.Categorical(), *batch("categorical", 24, 4, 3)


def train(model: nn.Module, loss: nn.Module, rule: Any, x: Tensor, t: Tensor) -> None:
    rule.zero_grad()
    loss(model(x), t).backward()
    rule.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    before = values(model)
    yield
    assert all(torch.equal(p, q) for p, q in zip(values(model), before, strict=True))


# ------------------------------------------------ The minibatch is run again


EDITS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "input": lambda x, t: x.add_(1.0),
    "a row of the input": lambda x, t: x[3].zero_(),
    "target": lambda x, t: t.copy_(t.flip(0)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_minibatch_changed_in_place_before_the_step(edit: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    loss(model(x), t).backward()
    EDITS[edit](x, t)
    with unmoved(model), pytest.raises(RuntimeError, match="changed in place"):
        optimizer.step()
    train(model, loss, optimizer, x, t)  # the next one is as good as any
    EDITS[edit](x, t)  # after the step everybody may


def test_a_keyword_input_changed_in_place() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(4, 6, 3)

        def forward(self, given: dict[str, Tensor]) -> Tensor:
            return self.inner(given["x"])

    _, loss, x, t = problem()
    model = Net()
    optimizer = qd.Riemannian(model, loss)
    loss(model(given={"x": x}), t).backward()
    x.mul_(2.0)
    with unmoved(model), pytest.raises(RuntimeError, match="changed in place"):
        optimizer.step()


def test_a_model_that_writes_into_its_own_input() -> None:
    _, loss, x, t = problem()
    model = nn.Sequential(nn.ELU(inplace=True), *mlp(4, 6, 3))
    optimizer = qd.Riemannian(model, loss)
    loss(model(x), t).backward()
    with unmoved(model), pytest.raises(RuntimeError, match="give the model a copy"):
        optimizer.step()


def test_inputs_made_in_inference_mode_have_no_version_to_check() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(4, 6, 3)

        def forward(self, x: Tensor, offset: Tensor) -> Tensor:
            return self.inner(x + offset)

    _, loss, x, t = problem()
    model = Shifted()
    optimizer = qd.Riemannian(model, loss)
    with torch.inference_mode():
        offset = torch.ones(4, dtype=torch.float64)
    before = values(model)
    loss(model(x, offset), t).backward()
    optimizer.step()
    assert not torch.equal(model.inner[0].weight, before[0])


# ------------------------------------------------ Schedulers and checkpoints of another kind of step


def test_a_scheduler_that_cycles_momentum() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=6)
    with unmoved(model), pytest.raises(ValueError, match="cycle_momentum=False"):
        train(model, loss, optimizer, x, t)


def test_a_scheduler_that_does_not() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=6, cycle_momentum=False)
    for _ in range(3):
        train(model, loss, optimizer, x, t)
        scheduler.step()
    assert optimizer.auto is not None and optimizer.auto.factor < 1


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("to", ["auto", "fixed"])
def test_a_state_of_the_other_kind_of_step(to: str, plain: bool) -> None:
    """``plain`` is what ``torch.distributed.checkpoint`` hands over."""
    model, loss, x, t = problem()
    kinds: dict[str, dict[str, Any]] = {"auto": {}, "fixed": {"lr": 0.01, "momentum": 0.5}}
    other = kinds["fixed" if to == "auto" else "auto"]
    source, target = qd.Riemannian(model, loss, **other), qd.Riemannian(model, loss, **kinds[to])
    train(model, loss, source, x, t)
    saved = source.state_dict()
    if plain:
        saved = {key: saved[key] for key in ("state", "param_groups")}
    before = copy.deepcopy(target.param_groups[0]["lr"])
    with pytest.raises(ValueError, match="step='auto'"):
        target.load_state_dict(saved)
    assert target.param_groups[0]["lr"] == before and not target.state


# ------------------------------------------------ Bounds


@pytest.mark.usefixtures("warm")
def test_an_update_ends_where_the_bound_does() -> None:
    """The step is judged from where the parameters were, not from where they would have been without the bound."""
    model, x = mlp(4, 6, 3), batch("gaussian", 24, 4, 3)[0]
    loss = qd.LearnedGaussian(3, min_std=0.99).double()
    optimizer = qd.Riemannian(model, loss)
    for _ in range(4):
        before = loss.log_std.detach().clone()
        train(model, loss, optimizer, x, 1e-3 * x[:, :3])
        moved = loss.log_std.detach() - before
        kept = optimizer.state[loss.log_std].get("update", torch.zeros(3, dtype=torch.float64))
        torch.testing.assert_close(kept, moved, rtol=0, atol=1e-15)
    assert torch.allclose(loss.log_std, torch.tensor(math.log(0.99), dtype=torch.float64))
