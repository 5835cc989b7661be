"""Activation checkpointing, reentrant and not, and in-place activations, float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle import METRICS, assert_close, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quasidiag as qd
from quasidiag.moments import Moments

N = 4


class Segments(nn.Module):
    """Three segments, of which the inner ones may be checkpointed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6))
        self.attention = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.2)
        self.last = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).relu_()
        for segment in (self.inner, self.attention):
            run = segment
            if self.reentrant is not None:
                run = partial(checkpoint, segment, use_reentrant=self.reentrant)
            z = run(z)
        return self.last(z.mean(1))


def all_moments(reentrant: bool | None, metric: str, criterion: bool, **options: str) -> list:
    model = Segments(reentrant)
    x, t = torch.randn(N, 5, 4), torch.randint(3, (N,))
    torch.manual_seed(1)
    if criterion:
        optimizer, _ = step(model, x, t, qd.Categorical(), metric, **options)
    else:
        optimizer = qd.Riemannian(model, lr=0.0, metric=metric, **options)
        nn.functional.cross_entropy(model(x), t).backward()
        optimizer.step()
    return [optimizer.moments(p) for p in model.parameters() if p.dim() > 1]


def assert_all_close(got: list[Moments], expected: list[Moments]) -> None:
    assert len(got) == len(expected) > 6
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("sharing", ["expand", "exact"])
@pytest.mark.parametrize("metric", METRICS)
def test_not_reentrant_is_the_same_as_none(metric: str, sharing: str) -> None:
    run = partial(all_moments, metric=metric, criterion=True, sharing=sharing)
    assert_all_close(run(False), run(None))


@pytest.mark.parametrize("sharing", ["expand", "exact"])
@pytest.mark.parametrize("criterion", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_outer_product_is_the_same_as_none(reentrant: bool, criterion: bool, sharing: str) -> None:
    run = partial(all_moments, metric="outer-product", criterion=criterion, sharing=sharing)
    assert_all_close(run(reentrant), run(None))


@pytest.mark.parametrize("metric", ["monte-carlo", "exact", "backpropagated"])
def test_reentrant_is_told_where_derivatives_are_asked_for(metric: str) -> None:
    model, loss = Segments(True), qd.Categorical()
    before = [p.clone() for p in model.parameters()]
    x, t = torch.randn(N, 5, 4), torch.randint(3, (N,))
    optimizer = qd.Riemannian(model, loss, lr=0.1, metric=metric)
    with pytest.raises((RuntimeError, TypeError), match=r"use_reentrant=False|outer-product"):
        loss(model(x), t).backward()
    optimizer.close()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_reentrant_at_the_bottom_is_told_too() -> None:
    """With nothing to ask for below the checkpoint nobody would notice: its layers are just never seen."""

    class Bottom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.inner, x.requires_grad_(), use_reentrant=True))

    model, loss = Bottom(), qd.Categorical()
    before = [p.clone() for p in model.parameters()]
    optimizer = qd.Riemannian(model, loss, lr=0.1, metric="monte-carlo")
    loss(model(torch.randn(N, 4)), torch.randint(3, (N,))).backward()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    "layers",
    [
        lambda: (nn.Linear(4, 5), (6, 4), 30),
        lambda: (nn.Conv1d(4, 5, 2), (4, 5), 20),
        lambda: (nn.BatchNorm1d(4), (4, 5), 20),
        lambda: (nn.LayerNorm(5), (4, 5), 20),
        lambda: (nn.Embedding(4, 5), None, 15),
    ],
)
def test_in_place_activations(layers, metric: str) -> None:
    """The same moments, to the bit, as with an activation that copies."""

    def run(inplace: bool) -> Moments:
        torch.manual_seed(0)
        layer, shape, outputs = layers()
        model = nn.Sequential(
            layer, nn.LeakyReLU(0.3, inplace), nn.Flatten(), nn.Linear(outputs, 3)
        )
        x = torch.randint(4, (N, 3)) if shape is None else torch.randn(N, *shape)
        t = torch.randint(3, (N,))
        optimizer, _ = step(model, x, t, qd.Categorical(), metric)
        return optimizer.moments(layer)

    for one, other in zip(run(True), run(False), strict=True):
        assert one is other is None or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU])
@pytest.mark.parametrize("metric", ["exact", "monte-carlo"])
def test_the_lowest_layer_and_its_activation_inside(
    activation: type[nn.Module], metric: str
) -> None:
    """Its slope is then taken for all vectors at once, from what the checkpoint computes again."""
    found = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3)).double()
        x, t = torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))
        loss = qd.Categorical()
        optimizer = qd.Riemannian(model, loss, lr=0.0, metric=metric)
        lower = partial(checkpoint, model[:2], use_reentrant=False) if inside else model[:2]
        loss(model[2](lower(x)), t).backward()
        optimizer.step()
        found.append(optimizer.moments(model[0]))
    assert_close(*found)
