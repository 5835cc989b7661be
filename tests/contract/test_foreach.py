"""``foreach``: many small tensors with one call each give the numbers that the loop over them gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, values
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import quasidiag as qd
from quasidiag import together


class Scale(nn.Module):
    """In no block: the diagonal rule."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x + self.offset


class Small(nn.Module):
    """Layers of every kind that can be put side by side, several of each, and some that cannot."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 3), nn.Tanh())
        self.body = nn.Sequential()
        for _ in range(depth):
            self.body += nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), Scale(8))
            self.body += nn.Sequential(
                nn.Linear(8, 8, bias=False), nn.RMSNorm(8), nn.GroupNorm(2, 8)
            )
        self.body[0].bias.requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.convs(x).flatten(1)))


def run(foreach: bool | None, dtype: torch.dtype = torch.float64, **options: Any) -> list[Tensor]:
    """Parameters and metric after four steps of the same training, with a group of its own for the head."""
    torch.manual_seed(0)
    model = Small().to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 2, 8, generator=generator, dtype=torch.float64).to(dtype)
    t = torch.randint(3, (12,), generator=generator)
    summed = options.get("loss_reduction") == "sum"
    loss: Any = nn.CrossEntropyLoss(reduction="sum") if summed else qd.Categorical()
    head = set(model.head.parameters())
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p not in head]},
        {"params": list(head), "gamma": 0.5, "eps": 1e-3},
    ]
    with pytest.warns(UserWarning, match="Scale"):
        optimizer = qd.Riemannian(
            model, None if summed else loss, params=groups, foreach=foreach, **options
        )
    before = values(model)
    for _ in range(4):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    assert_moved(before, model, 1e-6)
    return values(model) + metric(optimizer)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"momentum": 0.5, "weight_decay": 0.1},
    "up": {"maximize": True},
    "a tensor": {
        "lr": torch.tensor(0.01, dtype=torch.float64),
        "momentum": 0.9,
        "weight_decay": 0.1,
    },
    "a sum": {"loss_reduction": "sum"},
    "no eps": {"eps": 0.0, "floor": 0.0},
    "safeguards": {"safeguard": (0.1, 0.01, 0.1)},
    "automatic": {"lr": None},
    "now and then": {"metric_every": 2},
}


@pytest.mark.parametrize("foreach", [True, None])
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_loop(name: str, reduction: str, foreach: bool | None) -> None:
    options = {"lr": 0.01, "reduction": reduction} | OPTIONS[name]
    # The automatic step is a function of many sums, and the full blocks are badly conditioned.
    tolerance = 1e-7 if name == "automatic" else 1e-10
    assert_same(run(foreach, **options), run(False, **options), tolerance)


@pytest.mark.parametrize("kind", METRICS[:3])
def test_equals_the_loop_under_every_metric(kind: str) -> None:
    options = {"lr": 0.01, "metric": kind, "momentum": 0.5}
    assert_same(run(True, **options), run(False, **options), 1e-12)


def test_half_precision_parameters() -> None:
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    one, other = run(True, torch.bfloat16, **options), run(False, torch.bfloat16, **options)
    assert [a.dtype for a in one] == [b.dtype for b in other]
    assert_same(one, other, 2e-2)


def test_a_weight_that_is_frozen_later() -> None:
    ends = []
    for foreach in (True, False):
        torch.manual_seed(0)
        model, loss = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double(), qd.Categorical()
        optimizer = qd.QDOP(model, loss, lr=0.01, foreach=foreach, momentum=0.9)
        x, t = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4
        for step in range(3):
            optimizer.zero_grad()
            model[1].weight.requires_grad_(step == 0)
            loss(model(x), t).backward()
            optimizer.step()
        ends.append(values(model))
    assert_same(*ends)


def test_preconditioning() -> None:
    found = []
    for foreach in (True, False):
        torch.manual_seed(0)
        model, loss = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double(), qd.Categorical()
        optimizer = qd.QDOP(model, loss, lr=0.0, foreach=foreach)
        loss(model(torch.randn(8, 4, dtype=torch.float64)), torch.arange(8) % 4).backward()
        optimizer.precondition_()
        found.append([p.grad for p in model.parameters()])
    assert_same(*found)


class Count(TorchDispatchMode):
    """How many operations PyTorch was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls(foreach: bool | None, layers: int, **options: Any) -> int:
    modules = [
        module for _ in range(layers) for module in (nn.Linear(6, 6), nn.LayerNorm(6), Scale(6))
    ]
    model, loss = nn.Sequential(*modules), qd.Categorical()
    with pytest.warns(UserWarning, match="Scale"):
        optimizer = qd.QDOP(model, loss, lr=0.01, foreach=foreach, metric_every=4, **options)
    for _ in range(2):  # the second does not touch the metric
        optimizer.zero_grad()
        loss(model(torch.randn(4, 6)), torch.arange(4)).backward()
        with Count() as count:
            optimizer.step()
    return count.calls


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=str)
def test_it_asks_for_fewer_operations(options: dict[str, Any]) -> None:
    """Of a layer more, the loop makes as many calls as of any; side by side there remain views and casts."""

    def each(foreach: bool | None) -> float:
        return (calls(foreach, 24, **options) - calls(foreach, 8, **options)) / 16

    assert each(None) == each(True) < each(False) / 3


def test_large_tensors_are_left_alone_unless_asked_for() -> None:
    size = int(together.SMALL**0.5) + 1
    for foreach, expected in ((None, {6}), (True, {6, size}), (False, set())):
        layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, size)]
        layers += [nn.Linear(size, size), nn.Linear(size, size)]
        optimizer = qd.QDOP(nn.Sequential(*layers), lr=0.01, foreach=foreach)
        for p in optimizer.model.parameters():
            p.grad = torch.zeros_like(p)
        assert {block.weight.shape[1] for block in together.batches(optimizer)} == expected


@pytest.mark.parametrize("options", [{"lr": 0.01, "momentum": 0.9}, {}], ids=str)
def test_no_state_is_a_part_of_something_larger(options: dict[str, Any]) -> None:
    """What a batch was computed in does not stay in memory, nor in checkpoints."""
    model, loss = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, foreach=True, **options)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(torch.randn(8, 4)), torch.arange(8) % 4).backward()
        optimizer.step()
    for state in optimizer.state.values():
        for kept in state.values():
            if isinstance(kept, Tensor):
                assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


def test_it_travels_with_a_copy_and_wants_a_choice() -> None:
    optimizer = qd.QDOP(nn.Linear(3, 2), lr=0.1, foreach=False)
    assert copy.deepcopy(optimizer).foreach is False
    with pytest.raises(ValueError, match="foreach"):
        qd.QDOP(nn.Linear(3, 2), lr=0.1, foreach="yes")
