"""The quadratic model is measured on a part of the samples, where a part of them gives that part of the outputs."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from parts import F64, Packed, directions, entry, train
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto.quadratic import JUDGES, MOST
from quasidiag.auto.replay import Replay
from quasidiag.strata import Part, Strata


class Centred(nn.Module):
    """Samples that see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = mlp(4, 6), mlp(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return self.out((h - h.mean(0)).tanh())


class TimeFirst(nn.Module):
    """Takes ``[samples, times, 4]``, and gives ``[times, samples, 3]``, flat or not."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.net, self.flat = mlp(4, 6, 3), flat

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x).transpose(0, 1)
        return y.reshape(-1, 3) if self.flat else y.contiguous()


class Attending(nn.Module):
    """Takes ``[times, samples, 4]``, as attention does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2).double(), mlp(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


DEPENDENT: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "centred": (Centred, (512, 4), (512,)),
    "times first": (lambda: TimeFirst(False), (32, 32, 4), (32, 32)),
    "times first, unequal": (lambda: TimeFirst(False), (32, 24, 4), (24, 32)),
    "times first, flat": (lambda: TimeFirst(True), (32, 24, 4), (768,)),
    "attention": (Attending, (32, 24, 4), (32, 24)),
}


@pytest.mark.parametrize("name", list(DEPENDENT))
def test_where_a_part_of_the_samples_gives_something_else_all_are_taken(name: str) -> None:
    """The form is that of the whole minibatch, with its ignored targets."""
    make, shape, targets = DEPENDENT[name]
    generator = torch.Generator().manual_seed(0)
    model = make()
    x = torch.randn(shape, generator=generator, dtype=F64)
    t = torch.randint(3, targets, generator=generator)
    t[len(t) // 2 :] = -100
    quadratic, replay, kept = entry(model, t, x)
    form = quadratic._form(kept, directions(model))[0]
    quadratic.share = 1.0
    torch.testing.assert_close(form, quadratic._form(kept, directions(model))[0])
    assert not replay.division.divisible and replay.rerun.mode != "differences"
    assert all(module.training for module in model.modules())


def test_a_part_of_the_samples_of_a_batch_norm() -> None:
    """In training mode samples see each other in it, and a part of them still stands for all."""
    model = nn.Sequential(mlp(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), mlp(6, 3)).double()
    x, t = batch("categorical", 512, 4, 3)
    _, replay, kept = entry(model, t, x)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    output, _, _ = replay.tangents(kept, directions(model), 0.25)
    assert replay.division.divisible and len(output) == 128
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(module.training for module in model.modules())


def test_a_part_without_the_longest_sequence() -> None:
    """Does not fit, after others that did."""
    model, loss = Packed(), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, t = torch.randn(32, 20, 4, dtype=F64), torch.randint(3, (32, 20))
    for longest in (0, 0, 31, 0):
        lengths = torch.full((32,), 12)
        lengths[longest] = 20
        target = torch.where(torch.arange(20) < lengths.unsqueeze(1), t, -100)
        optimizer.zero_grad()
        loss(model(x, lengths), target).backward()
        optimizer.step()
        assert optimizer._model is not None
        assert optimizer._model.replay.division.divisible == (longest == 0 and optimizer.steps < 3)


class Wide(nn.Module):
    """Many terms from each sample, after a batch norm, which refuses a single one."""

    def __init__(self) -> None:
        super().__init__()
        layers = mlp(4, 6), nn.BatchNorm1d(6).double(), nn.Tanh(), mlp(6, 600)
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).view(-1, 200, 3)


def test_a_short_minibatch_at_the_end_of_an_epoch() -> None:
    model, loss = Wide(), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    for samples in (8, 8, 3, 8):
        x, _ = batch("categorical", samples, 4, 3)
        optimizer.zero_grad()
        loss(model(x), torch.randint(3, (samples, 200))).backward()
        optimizer.step()
    assert optimizer._model is not None and optimizer._model.replay.rerun.mode == "fast"


@pytest.mark.parametrize("ends", ["first", "last", "between"])
def test_targets_that_count_may_lie_anywhere(ends: str) -> None:
    """Unlabelled samples beside labelled ones, in any order: the curvature is about that of the whole minibatch."""
    model = mlp(4, 6, 3)
    x, t = batch("categorical", 2048, 4, 3)
    labelled = {"first": slice(0, 512), "last": slice(1536, None), "between": slice(1, None, 4)}
    t = torch.full_like(t, -100).index_put((torch.arange(2048)[labelled[ends]],), t[:512])
    quadratic, replay, kept = entry(model, t, x)
    for chosen in (True, False):
        replay.division.apart, quadratic.share = chosen, None
        kept.parts, kept.strata = {}, None
        form = quadratic._form(kept, directions(model))[0]
        quadratic.share = 1.0
        whole = quadratic._form(kept, directions(model))[0]
        torch.testing.assert_close(form.diagonal(), whole.diagonal(), rtol=0.3, atol=0.0)


# ------------------------------------------------ Of many terms, no more than are needed


def shares(terms: int, share: float | None, model: nn.Module) -> list[float]:
    """On which share of so many terms the model is measured, on which steps are tried, and on which they are judged."""
    quadratic, replay, kept = entry(
        model, torch.zeros(terms, dtype=torch.long), torch.randn(terms, 4, dtype=F64)
    )
    quadratic.share, asked = share, []

    def tangents(*given: Any) -> Any:
        asked.append(given[-1])
        return Replay.tangents(replay, *given)

    replay.tangents = tangents
    quadratic._form(kept, directions(replay.rerun.model))
    return [*asked, quadratic._trial(kept), quadratic._jury(kept)]


@pytest.mark.parametrize(
    ("terms", "share", "expected"),
    [
        (100, None, [1.0, 1.0, 1.0]),
        (200, None, [128 / 200, 1.0, 1.0]),
        (500, None, [0.5, 1.0, 1.0]),
        (MOST * 2, None, [0.5, 1.0, 1.0]),
        (MOST * 3, None, [1 / 3, 1.0, 1.0]),
        (JUDGES * 2, None, [MOST / JUDGES / 2, 0.5, 0.5]),
        (JUDGES * 2, 0.5, [0.5, 0.5, 0.5]),
        (JUDGES * 2, 1e-3, [128 / JUDGES / 2, 0.5, 0.5]),
    ],
)
def test_how_much_of_a_minibatch_is_run_again_where_its_samples_depend_on_dropout(
    terms: int, share: float | None, expected: list[float]
) -> None:
    model = nn.Sequential(mlp(4, 6), nn.Dropout(0.5), mlp(6, 3))
    assert shares(terms, share, model) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("terms", "share", "matter", "expected"),
    [
        (100, None, 10, [1.0, 1.0, 1.0]),
        (200, None, 10, [64 / 200, 64 / 200, 64 / 200]),
        (800, None, 10, [0.125, 0.125, 64 / 800]),
        (800, None, 200, [0.125, 0.125, 256 / 800]),
        (800, None, 500, [0.125, 0.125, 1.0]),
        (MOST * 16, None, 1000, [1 / 16, 1 / 16, 1024 / MOST / 16]),
        (MOST * 16, None, MOST * 7, [1 / 16, 1 / 16, JUDGES / MOST / 16]),
        (800, 0.5, 10, [0.5, 0.5, 64 / 800]),
        (800, 1e-3, 10, [64 / 800, 64 / 800, 64 / 800]),
    ],
)
def test_how_much_of_a_minibatch_is_run_again(
    terms: int,
    share: float | None,
    matter: int,
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Known(Strata):
        def __init__(self, derivatives: Tensor) -> None:
            super().__init__(derivatives)
            self.matter = float(matter)

    monkeypatch.setattr("quasidiag.auto.division.Strata", Known)
    assert shares(terms, share, mlp(4, 3)) == pytest.approx(expected)


def test_a_part_of_the_minibatch_judges_by_its_own_loss() -> None:
    """Before and after with the same masks, statistics and samples."""
    layers = mlp(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), mlp(6, 3)
    model = nn.Sequential(*layers).double()
    x, t = batch("categorical", 512, 4, 3)
    _, replay, kept = entry(model, t, x)
    assert torch.equal(*replay.values(kept, {}, 0.25)) and replay.division.divisible
    plain = mlp(4, 6, 3)
    _, replay, kept = entry(plain, t, x)
    start = {p: p.detach() + 0.1 for p in plain.parameters()}
    found = replay.values(kept, start, 0.25)
    elsewhere = copy.deepcopy(plain)
    part = replay.part(kept, 0.25)
    each = part.weights(part.picked.double()).tolist()
    with torch.no_grad():
        for p in elsewhere.parameters():
            p.add_(0.1)
        expected = [
            sum(
                w * qd.Categorical()(m(x[i : i + 1]), t[i : i + 1])
                for w, i in zip(each, part.picked)
            )
            / 512
            for m in (plain, elsewhere)
        ]
    torch.testing.assert_close([*found], expected)


def test_a_part_that_does_not_run_leaves_it_to_the_whole() -> None:
    """Sequences without the longest one are shorter."""
    model = Packed()
    x, lengths = torch.randn(32, 20, 4, dtype=F64), torch.full((32,), 12)
    lengths[0] = 20
    t = torch.randint(3, (32, 20))
    _, replay, kept = entry(model, t, x, lengths)
    replay.values(kept, {}, 0.5)
    assert replay.division.divisible
    lengths = lengths.roll(-1)
    _, replay, kept = entry(model, t, x, lengths)
    replay.division.divisible = True
    now, again = replay.values(kept, {}, 0.5)
    assert replay.division.divisible is False
    torch.testing.assert_close(now, again)
    torch.testing.assert_close(now, qd.Categorical()(model(x, lengths), t).detach())


class Asserting(nn.Module):
    """Takes a name for each sample, in a list, of which nobody takes a part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 6, 3)

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        assert len(names) == len(x), "a name for each sample"
        return self.net(x)


def test_whatever_a_model_raises_leaves_it_to_the_whole() -> None:
    model, names = Asserting(), ["a"] * 256
    optimizer = qd.Riemannian(model, criterion := qd.Categorical())
    x, t = batch("categorical", 256, 4, 3)
    for _ in range(5):
        optimizer.zero_grad()
        criterion(model(x, names), t).backward()
        optimizer.step()
    assert optimizer.auto is not None and optimizer._model is not None
    assert optimizer.auto.looked and not optimizer.auto.divisible
    assert optimizer._model.replay.rerun.mode == "fast" and model.training


def test_large_minibatches_are_trained_on_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all of them were run again."""
    x, _ = batch("categorical", 3 * JUDGES, 4, 3)
    t = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    last = []
    for most in (None, 10**9):
        if most is not None:
            monkeypatch.setattr("quasidiag.auto.quadratic.MOST", most)
            monkeypatch.setattr("quasidiag.auto.quadratic.JUDGES", most)
        optimizer = qd.Riemannian(mlp(4, 8, 3), qd.Categorical())
        first = train(optimizer, x, t, 1)
        last.append(train(optimizer, x, t, 29))
        assert optimizer.auto is not None and optimizer.auto.retreats == 0
        assert last[-1] < 0.3 * first
    assert last[0] == pytest.approx(last[1], rel=0.2)


@pytest.mark.parametrize("labelled", [slice(None), slice(1, None, 2), slice(0, None, 2)])
def test_a_large_minibatch_is_judged_by_what_counts(labelled: slice) -> None:
    """As the whole would, or by the whole if the samples that are picked do not count."""
    model, loss = mlp(4, 8, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, step_every=1)
    assert optimizer.auto is not None
    optimizer.auto.looked = optimizer.auto.divisible = True  # not apart: samples are not chosen
    x, t = batch("categorical", 4 * JUDGES, 4, 3)
    t = torch.full_like(t, -100).index_put((torch.arange(len(t))[labelled],), t[labelled])
    train(optimizer, x, t, 3)
    report, quadratic = optimizer.auto, optimizer._model
    assert report is not None and quadratic is not None
    found, way = [], {p: optimizer.state[p]["update"] for p in model.parameters()}
    for most in (JUDGES, 10**9):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quasidiag.auto.quadratic.JUDGES", most)
            assert not quadratic.judge(way)
        found.append(report.actual)
    assert found[0] < 0 and found[0] == pytest.approx(found[1], rel=0.1)


@pytest.mark.parametrize("kind", ["ignored", "learned"])
def test_a_loss_is_the_same_part_by_part(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts in which nothing counts included."""
    x, t = batch("categorical", 50, 4, 3)
    t[20:35] = -100
    loss: Any = qd.Categorical() if kind == "ignored" else qd.LearnedGaussian(3)
    target = t if kind == "ignored" else torch.rand(50, 3, dtype=x.dtype)
    model = mlp(4, 8, 3)
    optimizer = qd.Riemannian(model, loss, step_every=1)
    train(optimizer, x, target, 3)
    report, quadratic = optimizer.auto, optimizer._model
    assert report is not None and quadratic is not None
    way = {p: optimizer.state[p]["update"] for p in optimizer._group}
    found = []
    for most in (10**9, 3 * 7, 3):
        monkeypatch.setattr("quasidiag.auto.replay.AT_ONCE", most)
        optimizer.zero_grad()
        loss(model(x), target).backward()
        quadratic.judge(way)
        found.append(report.actual)
    assert found[0] != 0 and found[1:] == pytest.approx([found[0]] * 2, rel=1e-9)


class Viewed(nn.Module):
    """Takes its input for one that lies in one piece, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(50, 16), nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x.view(-1)).view(-1, 128))


def test_a_part_lies_in_one_piece_and_is_a_copy() -> None:
    model, loss = Viewed(), qd.Gaussian()
    optimizer = qd.Riemannian(model, loss)
    for _ in range(2):
        x = torch.randint(0, 50, (512, 8))
        optimizer.zero_grad()
        loss(model(x), torch.randn(512, 5)).backward()
        optimizer.step()
    assert optimizer._model is not None and optimizer._model.replay.division.divisible
    part = Part.even(512, 256, x.device).rows(x)
    assert part.is_contiguous() and part.data_ptr() != x.data_ptr()
    assert torch.equal(part, x[::2])


class Labelled(NamedTuple):
    """A minibatch as some data loaders give it."""

    x: Tensor
    note: str = ""


class Ruled(nn.Module):
    """Takes a named tuple; one class is ruled out; samples may see each other."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.net, self.centred = mlp(4, 6, 3), centred

    def forward(self, given: Labelled) -> Tensor:
        x = given.x - given.x.mean(0) if self.centred else given.x
        return self.net(x).masked_fill(torch.tensor([False, True, False]), -math.inf)


@pytest.mark.parametrize("centred", [False, True])
def test_outputs_that_are_not_finite_do_not_hide_the_others(centred: bool) -> None:
    x, t = torch.randn(600, 4, dtype=F64), torch.zeros(600, dtype=torch.long)
    model, replay, entered = entry(Ruled(centred), t, Labelled(x))
    part = replay.part(entered, 0.5)
    assert (part is None) is centred and replay.division.divisible is not centred
    whole = replay.rerun.run(entered, {})
    alike = replay.division.alike
    assert bool(alike(entered, whole, None)) and not alike(entered, whole + 1, None)
    del model
