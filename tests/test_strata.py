"""A few samples that stand for all, and the metric that they make up."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, mlp
from quasidiag.collect import Record
from quasidiag.kernels.squares import Squares
from quasidiag.sharing import Samples
from quasidiag.strata import FEW, STRATA, Part, Strata

F64 = torch.float64


def strata(sizes: Tensor) -> Strata:
    """Of samples with derivatives of these lengths."""
    return Strata(sizes.view(-1, 1))


@settings(deadline=None, max_examples=100)
@given(
    samples=st.integers(STRATA, 300),
    power=st.integers(0, 30),
    share=st.floats(0.01, 1.0),
    seed=st.integers(0, 10**6),
)
def test_some_stand_for_all(samples: int, power: int, share: float, seed: int) -> None:
    """As many as were asked for, each once, and in each stratum they stand for all of its samples."""
    sizes = torch.rand(samples, generator=torch.Generator().manual_seed(seed)) ** power
    kept = max(STRATA, math.ceil(share * samples))
    part = strata(sizes).part(kept)
    assert len(part.picked) == len(part.picked.unique()) == part.kept == kept
    assert sum(x.kept for x in part.strata) == kept and len(part.strata) <= STRATA
    assert sum(x.kept * x.each for x in part.strata) == pytest.approx(samples)
    assert all(x.each >= 1 for x in part.strata)
    assert part.share == kept / samples


def test_equal_samples_stand_for_equally_many() -> None:
    found = strata(torch.ones(512))
    part = found.part(64)
    assert found.matter == 512 and found.enough == 512
    assert all(stratum.each == pytest.approx(8, rel=0.1) for stratum in part.strata)


@pytest.mark.parametrize("heavy", [1, 3, 20])
def test_the_few_that_matter_are_all_taken_and_stand_for_themselves(heavy: int) -> None:
    sizes = torch.full((500,), 1e-4)
    places = torch.randperm(500, generator=torch.Generator().manual_seed(0))[:heavy]
    sizes[places] = 1.0 + torch.arange(heavy) / 100
    found = strata(sizes)
    part = found.part(FEW)
    assert found.matter == pytest.approx(heavy, rel=0.2) and found.enough == FEW
    assert {*places.tolist()} <= {*part.picked.tolist()}
    weights = part.weights(part.rows(sizes))
    torch.testing.assert_close((weights * part.rows(sizes)).sum(), sizes.sum(), rtol=1e-3, atol=0)


def test_how_many_matter_does_not_depend_on_how_much() -> None:
    sizes = torch.rand(500, generator=torch.Generator().manual_seed(0)) ** 8
    assert strata(1e-30 * sizes).matter == pytest.approx(strata(sizes).matter)


@pytest.mark.parametrize("size", [0.0, math.nan, math.inf, 1e-30])
def test_samples_that_do_not_tell_are_taken_alike(size: float) -> None:
    found = strata(torch.full((500,), size))
    assert found.enough == 500
    assert max(stratum.each for stratum in found.part(64).strata) < 9


def test_a_sample_that_is_not_finite_does_not_matter() -> None:
    sizes = torch.rand(500, generator=torch.Generator().manual_seed(0)) + 0.5
    without = strata(sizes).matter
    sizes[7], sizes[8] = math.inf, math.nan
    assert strata(sizes).matter == pytest.approx(without, rel=0.02)


def test_strata_of_samples_in_no_order() -> None:
    """Each piece has the samples of its stratum, which have weights of their own."""
    sizes = torch.rand(300, generator=torch.Generator().manual_seed(0)) ** 4
    part = strata(sizes).part(100)
    rows = part.rows(sizes)
    found = [t for _, t in part.split(rows)]
    for heavier, lighter in itertools.pairwise(found):
        assert float(heavier.min()) >= float(lighter.max())
    weights = part.weights(rows)
    for (each, piece), stratum in zip(part.split(rows), part.strata, strict=True):
        mine = torch.isin(rows, piece)
        assert mine.sum() == stratum.kept and bool((weights[mine] == each).all())


def test_rows_and_what_they_stand_for() -> None:
    """With several rows for each sample, as of a sequence."""
    sizes = torch.arange(300.0) ** 4
    part = strata(sizes).part(100)
    x = torch.arange(600).view(600, 1).expand(600, 2)
    rows = part.rows(x)
    assert torch.equal(rows.view(100, 2, 2)[:, 0, 0], 2 * part.picked)
    weights = part.weights(rows.double())
    assert weights.shape == (200, 1) and float(weights.sum()) == pytest.approx(600)
    pieces, alone = [*part.split(rows)], [*part.split(part.rows(sizes))]
    assert part.picked.tolist() == sorted(part.picked.tolist())
    assert torch.equal(torch.cat([y for _, y in pieces]).sort(0).values, rows)
    lightest = [float(t.min()) for _, t in alone]
    assert lightest == sorted(lightest, reverse=True)  # the first strata matter most
    assert [len(t) for _, t in alone] == [stratum.kept for stratum in part.strata]
    assert [len(y) for _, y in pieces] == [2 * stratum.kept for stratum in part.strata]
    assert [each for each, _ in pieces] == [stratum.each for stratum in part.strata]


def test_samples_at_even_distances() -> None:
    part = Part.even(10, 5, torch.device("cpu"))
    assert part.picked.tolist() == [0, 2, 4, 6, 8] and not part.chosen
    assert Part.even(7, 3, torch.device("cpu")).picked.tolist() == [0, 2, 4]


# ------------------------------------------------------------------------------------------- the metric


def records(model: nn.Module, x: Tensor, t: Tensor, **options: Any) -> list[Record]:
    """What enters the metric in the first step."""
    loss = qd.Categorical()
    with qd.Riemannian(model, loss, **options) as optimizer:
        loss(model(x), t).backward()
        return [*optimizer._collector.records]


def formed(w: Any) -> Tensor:
    """Weights as a tensor."""
    return w.formed() if isinstance(w, Squares) else w


def sure(sizes: tuple[int, ...]) -> nn.Module:
    """A classifier that is sure of nearly all samples, so that few draws are not what it says."""
    model = mlp(*sizes, activation="tanh")
    with torch.no_grad():
        for p in model[-1].parameters():
            p.mul_(40)
    return model


def test_a_metric_of_the_samples_that_matter_is_nearly_that_of_all() -> None:
    x, t = batch("categorical", 800, 4, 3)
    few = records(sure((4, 6, 3)), x, t)
    every = records(sure((4, 6, 3)), x, t, metric_fraction=1.0)
    assert [len(r.a) for r in every] == [800, 800] and all(len(r.a) < 400 for r in few)
    for some, whole in zip(few, every):
        found, expected = (formed(r.w).T @ r.a.square() for r in (some, whole))
        torch.testing.assert_close(found.sum(), expected.sum(), rtol=0.1, atol=0)


def test_each_sample_enters_the_metric_times_what_it_stands_for() -> None:
    """Against the records of all samples, picked and multiplied one by one."""
    x, t = batch("categorical", 300, 4, 3)
    model, loss = sure((4, 6, 3)), qd.Categorical()
    found: list[Part] = []
    with qd.Riemannian(model, loss) as optimizer:
        choose = optimizer._collector._chosen

        def chosen(*given: Any) -> Part | None:
            part = choose(*given)
            assert part is not None
            found.append(part)
            return part

        optimizer._collector._chosen = chosen  # type: ignore[method-assign]
        loss(model(x), t).backward()
        few = [*optimizer._collector.records]
    every = records(sure((4, 6, 3)), x, t, metric_fraction=1.0)
    (part,) = found
    each = part.weights(part.picked.double()).tolist()
    for some, whole in zip(few, every):
        w, v = formed(some.w), formed(whole.w)
        assert len(w) == part.kept
        for k, (weight, i) in enumerate(zip(each, part.picked.tolist())):
            torch.testing.assert_close(w[k], weight * v[i], rtol=1e-9, atol=1e-14)
            assert torch.equal(some.a[k], whole.a[i])


def test_a_sequence_enters_the_metric_times_what_it_stands_for() -> None:
    """All of it, with what its time steps add up to."""
    x, t = torch.randn(300, 5, 4, dtype=F64), torch.randint(3, (300,))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head = nn.GRU(4, 6, batch_first=True).double(), sure((6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x)[0][:, -1])

    few, every = (
        [r for r in records(Last(), x, t, **options) if isinstance(r.w, Samples)]
        for options in ({}, {"metric_fraction": 1.0})
    )
    assert len(few) == len(every) == 2
    for some, whole in zip(few, every):
        (a, d), (b, e) = ((c.a, c.delta) for r in (some, whole) for c in r.w.calls)
        assert d.shape[1:] == e.shape[1:] and len(d) < 150 and len(e) == 300
        for k in range(len(d)):
            (i,) = (a[k] == b).flatten(1).all(1).nonzero().flatten().tolist()
            ratio = (d[k] / e[i]).flatten()
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-9, atol=0)
            assert ratio[0] >= 1
        assert float(d.square().sum()) == pytest.approx(float(e.square().sum()), rel=0.2)


class Words(nn.Module):
    """Words are looked up, one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 4).double(), nn.Linear(4, 3).double()
        with torch.no_grad():
            self.out.weight.mul_(40)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))


def test_lookup_tables_use_all_samples() -> None:
    torch.manual_seed(0)
    out, table = records(Words(), torch.randint(10, (400,)), torch.randint(3, (400,)))
    assert len(table.a) == 400 and len(out.a) < 200


@pytest.mark.parametrize(
    "options",
    [
        {"metric_fraction": 1.0},
        {"metric": "exact"},
        {"samples": 2},
        {"sharing": "exact"},
        {"step": "fixed", "metric": "monte-carlo"},
    ],
)
def test_otherwise_all_samples_enter_the_metric(options: dict[str, Any]) -> None:
    x, t = batch("categorical", 300, 4, 3)
    assert all(len(record.a) == 300 for record in records(sure((4, 6, 3)), x, t, **options))


class Pairs(nn.Module):
    """Both of a pair go through one layer, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.both = sure((4, 3)), sure((6, 3))

    def forward(self, x: Tensor) -> Tensor:
        halves = self.one(torch.cat([x, x.flip(1)])).tanh()
        return self.both(torch.cat(halves.chunk(2), 1))


def test_a_layer_with_other_rows_than_the_samples_uses_them_all() -> None:
    x, t = batch("categorical", 300, 4, 3)
    both, one = records(Pairs(), x, t)
    assert len(one.a) == 600 and len(both.a) < 150


class Disordered(nn.Module):
    """The samples go through a layer in another order, and are compared with as many prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = mlp(4, 6), mlp(4, 6), sure((300, 3))
        self.prototypes = torch.randn(300, 4, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x)).roll(7)
        x = self.first(x[order])[order.argsort()]
        return self.last((x @ self.second(self.prototypes).T).tanh())


def test_rows_that_are_not_the_samples_are_all_used() -> None:
    """In as many rows, too; and for good, once a layer was given others."""
    x, t = batch("categorical", 300, 4, 3)
    model, loss = Disordered(), qd.Categorical()
    with qd.Riemannian(model, loss) as optimizer:
        for _ in range(2):
            optimizer._collector.restart()
            loss(model(x), t).backward()
            found = {r.module: len(r.a) for r in optimizer._collector.records}
            rows = [found[net[0]] for net in (model.first, model.second, model.last)]
            assert rows[:2] == [300, 300] and rows[2] < 150


def test_a_layer_without_derivatives_does_not_tell_what_it_was_given() -> None:
    """As below a head that begins at zero: rows are not the samples' because nothing says otherwise."""
    x, t = batch("categorical", 300, 4, 3)
    model, loss = Disordered(), qd.Categorical()
    head = model.last[0].weight
    weight = head.detach().clone()
    with qd.Riemannian(model, loss) as optimizer:
        for by in (0.0, 1.0):
            with torch.no_grad():
                head.copy_(by * weight)
                model.last[0].bias.copy_(torch.tensor([3.0, 0.0, -3.0]))
            optimizer._collector.restart()
            loss(model(x), t).backward()
            found = {r.module: len(r.a) for r in optimizer._collector.records}
            assert found[model.first[0]] == found[model.second[0]] == 300


@pytest.mark.parametrize("rows", [150, 600])
def test_a_layer_that_is_given_other_rows_later_uses_them_all(rows: int) -> None:
    x, t = batch("categorical", 300, 4, 3)

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.out, self.more = mlp(4, 6), sure((6, 3)), False

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x).tanh()
            other = x[torch.arange(rows) % len(x)]
            return self.out(y + self.one(other).mean() if self.more else y)

    model, loss = Sometimes(), qd.Categorical()
    with qd.Riemannian(model, loss) as optimizer:
        for model.more in (False, True):
            optimizer._collector.restart()
            loss(model(x), t).backward()
            found = [len(r.a) for r in optimizer._collector.records if r.module is model.one[0]]
            assert min(found) < 150 if not model.more else max(found) == rows


def test_few_samples_all_enter_the_metric() -> None:
    x, t = batch("categorical", 2 * FEW - 1, 4, 3)
    assert all(len(record.a) == 2 * FEW - 1 for record in records(sure((4, 6, 3)), x, t))
