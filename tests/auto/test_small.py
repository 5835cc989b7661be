"""Small minibatches: shorter steps, unless they are all there is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto import descent
from quasidiag.auto.report import Report

pytestmark = pytest.mark.usefixtures("warm")
SIZES = (5, 8, 3)


def factors(
    model: nn.Module, minibatches: list[tuple[Tensor, Tensor]], micro: int = 1
) -> list[float]:
    """What the steps were multiplied by."""
    criterion, found = qd.Categorical(), []
    rule = qd.Riemannian(model, criterion)
    for x, t in minibatches:
        rule.zero_grad()
        for a, b in zip(x.chunk(micro), t.chunk(micro)):
            (criterion(model(a), b) / micro).backward()
        rule.step()
        assert isinstance(rule.auto, Report)
        found.append(rule.auto.factor)
    return found


def samples(size: int, seed: int) -> tuple[Tensor, Tensor]:
    return batch("categorical", size, SIZES[0], SIZES[-1], seed=seed)


@pytest.mark.parametrize(
    ("size", "micro"), [(20, 1), (125, 1), (120, 4), (descent.FULL, 1), (900, 1)]
)
def test_steps_are_shorter_by_the_root_of_the_missing_samples(size: int, micro: int) -> None:
    found = factors(mlp(*SIZES), [samples(size, seed) for seed in range(6)], micro)
    assert found == pytest.approx([min(1.0, math.sqrt(size / descent.FULL))] * 6)


def test_all_data_in_one_minibatch_have_no_noise() -> None:
    """It takes a step to see that; their order does not matter."""
    x, t = samples(50, 0)
    orders = [torch.randperm(50, generator=torch.Generator().manual_seed(k)) for k in range(6)]
    found = factors(mlp(*SIZES), [(x[order], t[order]) for order in orders])
    assert found == pytest.approx([math.sqrt(50 / descent.FULL), *[1.0] * 5])


@pytest.mark.parametrize("cycle", [2, 4])
def test_minibatches_that_come_round_are_samples(cycle: int) -> None:
    found = factors(mlp(*SIZES), [samples(50, k % cycle) for k in range(20)])
    assert found == pytest.approx([math.sqrt(50 / descent.FULL)] * 20)


@pytest.mark.parametrize("classes", [100, 101, 400])
def test_each_class_wants_a_few_terms(classes: int) -> None:
    minibatches = [batch("categorical", 125, 5, classes, seed=seed) for seed in range(2)]
    found = factors(mlp(5, 8, classes), minibatches)
    full = max(descent.FULL, descent.EACH * classes)
    assert found == pytest.approx([math.sqrt(125 / full)] * 2)


def test_positions_of_a_sequence_are_terms_of_the_loss() -> None:
    minibatches = [
        (x.view(10, 12, 5), t.view(10, 12)) for x, t in [samples(120, k) for k in (0, 1)]
    ]
    found = factors(mlp(*SIZES), minibatches)
    assert found == pytest.approx([math.sqrt(120 / descent.FULL)] * 2)


@pytest.mark.parametrize("same", [False, True])
def test_targets_of_sequences_may_be_flattened(same: bool) -> None:
    """Then they have as many rows for each sample as it has positions; those may be an argument of their own."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(*SIZES)

        def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
            x, places = given
            return self.net(x + places.unsqueeze(1)).flatten(0, 1)

    criterion, found = qd.Categorical(), []
    model, places = Tagger(), torch.arange(12).double() / 12
    rule = qd.Riemannian(model, criterion)
    assert rule.auto is not None
    for seed in range(3):
        x, _ = samples(60, 0 if same else seed)
        rule.zero_grad()
        criterion(model((x.view(5, 12, 5), places)), torch.arange(60) % 3).backward()
        rule.step()
        found.append(rule.auto.factor)
    short = math.sqrt(60 / descent.FULL)
    assert found == pytest.approx([short, *[1.0 if same else short] * 2])


def test_samples_that_look_alike_are_told_apart() -> None:
    """Signs, whose squares are all one, and classes in the same numbers."""
    minibatches = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(2, (30, SIZES[0]), generator=generator).double() * 2 - 1
        minibatches.append((x, torch.arange(30) % 3))
    found = factors(mlp(*SIZES), minibatches)
    assert found == pytest.approx([math.sqrt(30 / descent.FULL)] * 20)


def test_arguments_that_are_no_samples_do_not_count() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(*SIZES)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x[0])

    mask = torch.full((7, 7), float("-inf"), dtype=torch.float64)
    model, criterion = Masked(), qd.Categorical()
    rule = qd.Riemannian(model, criterion)
    assert rule.auto is not None
    for seed in range(6):
        x, t = samples(40, seed)
        rule.zero_grad()
        criterion(model((x, mask)), t).backward()
        rule.step()
        assert rule.auto.factor == pytest.approx(math.sqrt(40 / descent.FULL))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(SIZES[0], 8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        main, side = self.net(x).chunk(2, dim=1)
        return main, side


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("main_first", [False, True])
def test_the_head_with_the_most_targets_says_how_many_there_are(
    main_first: bool, same: bool
) -> None:
    """Whichever is judged last: another one may have targets for a few samples only."""
    model, criterion = Heads(), qd.Categorical()
    rule = qd.Riemannian(model, criterion)
    assert rule.auto is not None
    found = []
    for seed in range(4):
        x, t = samples(125, 0 if same else seed)
        few = torch.where(torch.arange(125) % 50 == 0, t, criterion.ignore_index)
        rule.zero_grad()
        main, side = model(x)
        heads = [(1.0, main, t), (0.1, side, few)]
        losses = [w * criterion(y, u) for w, y, u in heads[:: 1 if main_first else -1]]
        sum(losses, torch.zeros(())).backward()
        rule.step()
        found.append(rule.auto.factor)
    short = math.sqrt(125 / descent.FULL)
    assert found == pytest.approx([short, *[1.0 if same else short] * 3])


def test_all_targets_tell_minibatches_apart() -> None:
    """Also those of the head that is not judged last."""
    model, criterion = Heads(), qd.Categorical()
    rule = qd.Riemannian(model, criterion)
    assert rule.auto is not None
    x, t = samples(125, 0)
    for seed in range(4):
        other = samples(125, seed)[1]
        rule.zero_grad()
        main, side = model(x)
        (criterion(main, other) + criterion(side, t)).backward()
        rule.step()
        assert rule.auto.factor == pytest.approx(math.sqrt(125 / descent.FULL))
