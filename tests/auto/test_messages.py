"""How a model may be called and what it may return; where that cannot be followed, the message says what to do."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, linear_layers, mlp
from quasidiag.auto import descent
from quasidiag.auto.proposal import Proposal
from quasidiag.auto.replay import Replay


@dataclass
class Result:
    """What a model returns."""

    logits: Tensor
    features: list[Tensor]


@dataclass(frozen=True, slots=True)
class Given:
    """What it is given."""

    x: Tensor
    name: str = "a minibatch"


@dataclass
class Odd:
    """A field that is not set yet, and one that leads back."""

    x: Tensor
    later: Tensor = field(init=False)
    itself: Any = None

    def __post_init__(self) -> None:
        self.itself = [self]


class Net(nn.Module):
    """Takes and returns what ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head, self.kind = mlp(4, 6), mlp(6, 3), kind

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x).tanh()

    def forward(self, given: Any) -> Any:
        named = self.kind in ("dataclass", "odd")
        h = self.encode(given.x if named else given["x"])
        return Result(self.head(h), [h]) if named else {"logits": self.head(h)}


WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Given, lambda y: y.logits),
    "odd": (Odd, lambda y: y.logits),
    "dictionary": (lambda x: {"x": x}, lambda y: y["logits"]),
    "ordered": (lambda x: OrderedDict(x=x), lambda y: y["logits"]),
}


@pytest.mark.parametrize("kind", WAYS)
def test_what_a_model_is_given_and_returns(kind: str) -> None:
    """A share of the samples is found there too, and a change in place."""
    give, take = WAYS[kind]
    model, criterion = Net(kind), qd.Categorical()
    x, t = batch("categorical", 24, 4, 3)
    replay = Replay(model, criterion, [*model.parameters()])
    logits = take(model(give(x)))
    criterion(logits, t).backward()
    replay.check()
    entry = replay.weighted()[0][1]
    output, target, _ = replay.tangents(entry, [{p: p.detach() for p in model.parameters()}], 0.5)
    torch.testing.assert_close(output, logits.detach()[::2])
    assert replay.division.divisible and torch.equal(target, t[::2])
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        replay.check()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("way", ["forward", "layers"])
def test_a_model_must_be_called_itself(way: str, later: bool) -> None:
    model, criterion = Net("dataclass"), qd.Categorical()
    optimizer = qd.Riemannian(model, criterion)
    x, t = batch("categorical", 24, 4, 3)
    for _ in range(5 * later):
        optimizer.zero_grad()
        criterion(model(Given(x)).logits, t).backward()
        optimizer.step()
    optimizer.zero_grad()
    y = model.forward(Given(x)).logits if way == "forward" else model.head(model.encode(x))
    criterion(y, t).backward()
    with pytest.raises(RuntimeError, match=r"model\(x\), not model\.forward\(x\)"):
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "metric": "exact"}], ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_data_parallel_is_refused_by_name(inside: bool, options: dict[str, Any]) -> None:
    model = nn.DataParallel(mlp(4, 6, 3))
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        qd.Riemannian(nn.Sequential(model) if inside else model, qd.Categorical(), **options)


def test_a_loss_is_to_be_minimised() -> None:
    """Turned round it would never move, without a word; a smaller part that is subtracted may be."""
    model, criterion = mlp(4, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, criterion)
    x, t = batch("categorical", 24, 4, 3)
    before = [p.detach().clone() for p in model.parameters()]
    (-criterion(model(x), t)).backward()
    with pytest.raises(
        ValueError, match="Categorical, enters what was backpropagated with a weight of -1"
    ):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    y = model(x)
    (criterion(y[:20], t[:20]) - 0.1 * criterion(y[20:], t[20:])).backward()
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_weights_that_add_up_to_nothing_are_rounding() -> None:
    model, loss = mlp(4, 6, 3).float(), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, t = (y.float() if y.is_floating_point() else y for y in batch("categorical", 24, 4, 3))
    y = model(x)
    sum(weight * loss(y, t) for weight in (0.7, -0.1, -0.6)).backward()
    optimizer.step()


def test_a_pass_through_a_frozen_model_is_none() -> None:
    """As of a generator's loss through the discriminator, whose gradients are zeros and not None."""
    model, loss = mlp(4, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, t = batch("categorical", 24, 4, 3)
    loss(model(x), t).backward()
    optimizer.zero_grad(set_to_none=False)
    model.requires_grad_(False)
    (-loss(model(x.clone().requires_grad_()), t)).backward()
    model.requires_grad_(True)
    loss(model(x), t).backward()
    optimizer.step()
    assert optimizer.auto is not None and optimizer.auto.samples == 24


def test_sparse_gradients() -> None:
    """As with an ``lr``: nobody stumbles over them before."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2))
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    loss(model(torch.randint(0, 10, (5, 3))), torch.zeros(5, dtype=torch.long)).backward()
    with pytest.raises(TypeError, match=r"0\.weight has a sparse gradient"):
        optimizer.step()


def test_a_layer_without_inputs() -> None:
    """Its weight has no numbers, and is no sample of anything."""
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 5))
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, t = torch.randn(8, 4), torch.randint(5, (8,))
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    assert model[1].bias.detach().abs().max() > 0


def test_a_direction_that_is_not_finite_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The criterion's own parameters go on by themselves; a product of zero with what is not finite would be not finite."""
    model, loss = nn.Linear(4, 2), qd.LearnedGaussian(2)
    optimizer = qd.Riemannian(model, loss)
    before = [p.detach().clone() for p in model.parameters()]

    def lost(optimizer: Any, gradient: dict[Tensor, Tensor], measures: bool) -> Proposal:
        return Proposal({p: torch.full_like(p, torch.nan) for p in model.parameters()}, {}, None)

    monkeypatch.setattr(descent, "propose", lost)
    loss(model(torch.randn(8, 4)), torch.randn(8, 2)).backward()
    with pytest.warns(RuntimeWarning, match="no layer moves in this step"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert loss.log_std.isfinite().all() and loss.log_std.detach().abs().max() > 0


@pytest.mark.parametrize(("rates", "warns"), [((1e-3, 1e-2), True), ((0.5, 1e-2), False)])
def test_step_sizes_given_for_factors(rates: tuple[float, float], warns: bool) -> None:
    """A group's lr is a factor here; those of Adam would leave next to nothing of the step."""
    model = mlp(4, 3, 2)
    layers = linear_layers(model)
    groups = [{"params": [*x.parameters()], "lr": lr} for x, lr in zip(layers, rates, strict=True)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        qd.Riemannian(model, qd.Categorical(), params=groups)
    assert any("factor of the automatic step" in str(w.message) for w in said) is warns
