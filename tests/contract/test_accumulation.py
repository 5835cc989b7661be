"""Gradient accumulation: k micro-batches give the step of one batch, and keep no more than one of them."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from loops import METRICS, SIZES, assert_moved, assert_same, metric, problem, train, values
from torch import Tensor, nn

import quasidiag as qd
from nets import mlp

STEPS = 3


def accumulate(
    model: nn.Module,
    loss: nn.Module,
    optimizer: qd.Riemannian,
    x: Tensor,
    t: Tensor,
    sizes: list[int],
    weighted: bool = True,
) -> None:
    optimizer.zero_grad()
    for part, target in zip(x.split(sizes), t.split(sizes), strict=True):
        weight = len(part) / len(x) if weighted else 1.0
        (weight * loss(model(part), target)).backward()
    optimizer.step()


@pytest.mark.parametrize("start", ["first", "identity", 2])
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
def test_any_reduction_and_start(reduction: str, start: str | int) -> None:
    runs = []
    for sizes in ([24], [8, 8, 8]):
        model, loss, x, t = problem()
        before = values(model)
        optimizer = qd.Riemannian(
            model, loss, lr=0.05, reduction=reduction, metric_start=start, gamma=0.1
        )
        for _ in range(STEPS):
            accumulate(model, loss, optimizer, x, t, sizes)
        assert_moved(before, model)
        runs.append(values(model))
    assert_same(*runs, tolerance=1e-9)


@pytest.mark.parametrize("sizes", [[12, 12], [5, 12, 7], [1] * 24])
@pytest.mark.parametrize("kind", ["outer-product", "exact", "backpropagated"])
def test_with_a_criterion_micro_batches_may_differ(kind: str, sizes: list[int]) -> None:
    runs = []
    for parts in ([24], sizes):
        model, loss, x, t = problem()
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, gamma=0.2, momentum=0.5)
        for _ in range(STEPS):
            accumulate(model, loss, optimizer, x, t, parts)
        runs.append(values(model) + metric_without_shift(optimizer, model))
    assert_same(*runs, tolerance=1e-9)


def metric_without_shift(optimizer: qd.Riemannian, model: nn.Module) -> list[Tensor]:
    """The shift is where moments are measured from, and may differ; the moments themselves may not."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    return [m for layer in layers for m in optimizer.moments(layer) if m is not None]


def test_monte_carlo_draws_one_target_per_sample_whatever_the_parts() -> None:
    runs = []
    for parts in ([24], [8, 8, 8]):
        model, loss, x, t = problem("bernoulli")
        optimizer = qd.QDMCNat(model, loss, lr=0.05, seed=3)
        accumulate(model, loss, optimizer, x, t, parts)
        runs.append(values(model))
    assert_same(*runs, tolerance=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_a_criterion(reduction: str) -> None:
    runs = []
    for sizes in ([24], [8, 8, 8]):
        model, _, x, t = problem()
        before = values(model)
        loss = nn.CrossEntropyLoss(reduction=reduction)
        optimizer = qd.QDOP(model, lr=0.05, loss_reduction=reduction)
        for _ in range(STEPS):
            accumulate(model, loss, optimizer, x, t, sizes, weighted=reduction == "mean")
        assert_moved(before, model)
        runs.append(values(model))
    assert_same(*runs, tolerance=1e-9)


def test_mean_and_sum_and_criterion_agree() -> None:
    runs = []
    for kind in ("criterion", "mean", "sum"):
        model, loss, x, t = problem()
        if kind == "criterion":
            optimizer = qd.QDOP(model, loss, lr=0.05)
        else:
            loss = nn.CrossEntropyLoss(reduction=kind)
            optimizer = qd.QDOP(model, lr=0.05, loss_reduction=kind)
        train(model, loss, optimizer, x, t, STEPS)
        runs.append(values(model))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_a_summed_loss_is_counted_when_the_metric_rests() -> None:
    runs = []
    for kind in ("mean", "sum"):
        model, _, x, t = problem()
        optimizer = qd.QDOP(model, lr=0.05, loss_reduction=kind, metric_every=2)
        train(model, nn.CrossEntropyLoss(reduction=kind), optimizer, x, t, 4)
        runs.append(values(model))
    assert_same(*runs)


@pytest.mark.parametrize("kind", METRICS[:3])
def test_one_backward_pass_through_several_forward_passes(kind: str) -> None:
    runs = []
    for sizes in ([24], [12, 12]):
        model, loss, x, t = problem("gaussian")
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, samples=1, seed=1)
        optimizer.zero_grad()
        parts = zip(x.split(sizes), t.split(sizes), strict=True)
        sum(loss(model(a), b) / len(sizes) for a, b in parts).backward()
        if kind == "monte-carlo":
            assert optimizer._collector.total == 24
        optimizer.step()
        runs.append(values(model))
    if kind != "monte-carlo":  # whose draws come in the order of the backward pass
        assert_same(*runs, tolerance=1e-9)


def test_two_losses_of_one_forward_pass_speak_of_the_same_samples() -> None:
    model, loss, x, t = problem("gaussian")
    whole = qd.QDOP(model, loss, lr=0.0)
    (loss(model(x), t)).backward()
    whole.step()
    expected = whole.moments(model[0]).mii.clone()
    whole.close()
    model.zero_grad()
    optimizer = qd.QDOP(model, loss, lr=0.0)
    output = model(x)
    (0.5 * loss(output, t) + 0.5 * loss(output, t)).backward()
    assert optimizer._collector.total == len(x)
    optimizer.step()
    # The samples' loss is the joint likelihood of both, whose derivatives add up whatever the two are weighted by.
    torch.testing.assert_close(optimizer.moments(model[0]).mii, 4 * expected)


def test_the_order_of_zero_grad_and_the_forward_pass_does_not_matter() -> None:
    for kind in METRICS:
        runs = []
        for late in (False, True):
            model, loss, x, t = problem()
            optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
            for _ in range(STEPS):
                if not late:
                    optimizer.zero_grad()
                value = loss(model(x), t)
                if late:
                    optimizer.zero_grad()
                value.backward()
                optimizer.step()
            runs.append(values(model))
        assert_same(*runs)


def test_gradients_dropped_by_the_model_drop_their_part_of_the_metric() -> None:
    runs = []
    for spoilt in (False, True):
        model, loss, x, t = problem()
        optimizer = qd.QDNat(model, loss, lr=0.05)
        if spoilt:  # a backward pass whose step never comes
            loss(model(100 * x), t).backward()
            model.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        runs.append(values(model) + metric(optimizer))
    assert_same(*runs)


@pytest.mark.parametrize("kind", ["outer-product", "exact"])
def test_at_most_one_micro_batch_is_kept(kind: str) -> None:
    model, loss = mlp(*SIZES), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    alive: list[weakref.ref[np.ndarray]] = []
    for i in range(4):
        array = np.random.default_rng(i).standard_normal((6, SIZES[0]))
        alive.append(weakref.ref(array))
        x = torch.from_numpy(array)
        (loss(model(x), torch.arange(6) % 3) / 4).backward()
        del array, x
        assert sum(ref() is not None for ref in alive) <= 1
    optimizer.step()
    assert all(ref() is None for ref in alive)


class Fault(torch.autograd.Function):
    """Identity, whose backward pass fails when told to."""

    broken = False

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if Fault.broken:
            raise MemoryError("no room")
        return gradient


class Fragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Fault.apply(x)


@pytest.mark.parametrize("kind", [*METRICS, "no criterion"])
def test_a_backward_pass_that_fails_half_way_is_forgotten(kind: str) -> None:
    ends = []
    for spoilt in (False, True):
        plain, loss, x, t = problem()
        model = nn.Sequential(plain[0], Fragile(), plain[1], plain[2])
        if kind == "no criterion":
            loss = nn.CrossEntropyLoss()
            optimizer: qd.Riemannian = qd.QDOP(model, lr=0.05)
        else:
            optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
        if spoilt:
            place = torch.Generator().manual_seed(optimizer.seed).get_state()
            Fault.broken = True
            with pytest.raises(MemoryError):
                loss(model(100 * x), t).backward()
            Fault.broken = False
            model.zero_grad()
            if optimizer._collector.generator is not None:
                optimizer._collector.generator.set_state(place)
        loss(model(x), t).backward()
        optimizer.step()
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends)
