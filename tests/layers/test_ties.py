"""Tied, reused, frozen and unused parameters, float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from oracle import (
    CLOSE,
    METRICS,
    assert_close,
    moments,
    occurrence_gradients,
    sample_gradients,
    step,
    unit_of,
    vectors,
)
from torch import Tensor, nn

import quasidiag as qd

N, L, V, D = 3, 4, 5, 3


class Tied(nn.Module):
    """A language model's skeleton: the head's weight is the embedding's."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.head = nn.Linear(D, V, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh().sum(1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("metric", METRICS)
def test_embedding_tied_with_the_head(metric: str, bias: bool) -> None:
    model, loss = Tied(bias), qd.Categorical()
    tokens, t = torch.randint(V, (N, L)), torch.randint(V, (N,))
    optimizer, drawn = step(model, tokens, t, loss, metric, sharing="exact", samples=2)
    y = model(tokens)
    vs = vectors(metric, loss, y, t, drawn)
    found = sample_gradients(y, vs, [model.embed.weight])
    expected = sum(g[0] ** 2 for g in found) / N
    torch.testing.assert_close(optimizer.moments(model.embed).mii, expected, **CLOSE)
    torch.testing.assert_close(optimizer.moments(model.head).mii, expected, **CLOSE)
    if bias:
        found = sample_gradients(y, vs, [model.head.bias])
        expected = sum(g[0] ** 2 for g in found) / N
        torch.testing.assert_close(optimizer.moments(model.head.bias).m00, expected, **CLOSE)


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
def test_both_uses_of_a_tied_weight_add(reduction: str) -> None:
    model, loss = Tied(bias=True), qd.Categorical()
    tokens, t = torch.randint(V, (N, L)), torch.randint(V, (N,))
    optimizer, _ = step(model, tokens, t, loss, "exact", reduction=reduction)
    e = model.embed(tokens)
    z = e.tanh().sum(1)
    y = model.head(z)
    mii = m00 = 0
    for u in vectors("exact", loss, y, t, []):
        (delta,) = torch.autograd.grad(y, e, u, retain_graph=True)
        uses = occurrence_gradients(model.embed(tokens), delta, -1, [model.embed.weight])
        uses += [[torch.outer(u[n], z[n].detach())] for n in range(N)]
        mii, m00 = mii + sum(g[0] ** 2 for g in uses) / N, m00 + (u**2).mean(0)
    torch.testing.assert_close(optimizer.moments(model.embed.weight).mii, mii, **CLOSE)
    torch.testing.assert_close(optimizer.moments(model.head.bias).m00, m00, **CLOSE)


def test_same_weight_different_biases() -> None:
    """Each parameter gets a diagonal block of its own, and a step that is the diagonal one."""
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    model = nn.Sequential(one, nn.Tanh(), two)
    x, t, loss = torch.randn(N, 4), torch.randint(4, (N,)), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=1.0, metric="exact", sharing="exact", eps=1e-6)
    before = {p: p.detach().clone() for p in model.parameters()}
    y = model(x)
    found = sample_gradients(y, vectors("exact", loss, y, t, []), list(model.parameters()))
    metric = [sum(g[i] ** 2 for g in found) / N for i in range(3)]
    loss(y, t).backward()
    gradients = {p: p.grad.clone() for p in model.parameters()}  # type: ignore[union-attr]
    optimizer.step()
    for p, m in zip(model.parameters(), metric, strict=True):
        torch.testing.assert_close(before[p] - p, gradients[p] / (m + 1e-6), **CLOSE)


def test_same_bias_different_weights() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.bias = one.bias
    model = nn.Sequential(one, nn.Tanh(), two)
    x, t, loss = torch.randn(N, 4), torch.randint(4, (N,)), qd.Categorical()
    optimizer, _ = step(model, x, t, loss, "exact", sharing="exact")
    y = model(x)
    found = sample_gradients(y, vectors("exact", loss, y, t, []), list(model.parameters()))
    for i, p in enumerate(model.parameters()):
        got = optimizer.moments(p)
        expected = sum(g[i] ** 2 for g in found) / N
        torch.testing.assert_close(got.m00 if p is one.bias else got.mii, expected, **CLOSE)


@pytest.mark.parametrize("sharing", ["expand", "reduce", "exact"])
def test_a_layer_in_two_places(sharing: str) -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x, t, loss = torch.randn(N, 4), torch.randint(4, (N,)), qd.Categorical()
    optimizer, _ = step(model, x, t, loss, "exact", sharing=sharing)
    first = layer(x)
    inner = first.tanh()
    y = layer(inner)
    calls = []
    for u in vectors("exact", loss, y, t, []):
        (delta,) = torch.autograd.grad(y, first, u, retain_graph=True)
        for n in range(N):
            lower = [torch.outer(delta[n], x[n]), delta[n]]
            upper = [torch.outer(u[n], inner[n].detach()), u[n]]
            together = [[a + b for a, b in zip(lower, upper, strict=True)]]
            calls += together if sharing == "exact" else [lower, upper]
    assert_close(optimizer.moments(layer), moments(calls, N, unit_of(layer, layer.weight)))


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4), nn.Linear(4, 3)
    )
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    for p in model[3].parameters():
        p.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, t, loss = torch.randn(N, 2, 5), torch.randint(3, (N,)), qd.Categorical()
    for metric in METRICS:
        with qd.Riemannian(model, loss, lr=0.01, metric=metric) as optimizer:
            loss(model(x), t).backward()
            optimizer.step()
            assert optimizer.moments(model[0]).mii is None
            assert optimizer.moments(model[2]).m0i is None
            with pytest.raises(KeyError):
                optimizer.moments(model[3])
        model.zero_grad()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not p.requires_grad, name


@pytest.mark.parametrize("metric", METRICS)
def test_unused_parameters_stay(metric: str) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)
            self.rnn = nn.GRU(4, 3)

        def forward(self, x: Tensor, everything: bool) -> Tensor:
            y = self.used(x)
            if everything:
                y = y + self.unused(x) + self.rnn(torch.stack([x, x]))[0][1]
            return y

    model, loss = Sometimes(), qd.Categorical()
    x, t = torch.randn(N, 4), torch.randint(3, (N,))
    optimizer = qd.Riemannian(model, loss, lr=0.1, metric=metric)
    for everything in (False, True, False):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss(model(x, everything), t).backward()
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert moved == [True] * 2 + [everything] * (len(moved) - 2)


def test_copies_and_pickles_go_on_alone() -> None:
    """Composite layers, ties and single samples: a copy watches its own model, and takes the same steps."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(V, D), nn.LSTM(D, D, batch_first=True)
            self.attention = nn.MultiheadAttention(D, 1, batch_first=True)
            self.head = nn.Linear(D, V)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            z = self.rnn(self.embed(tokens))[0]
            return self.head(self.attention(z, z, z)[0].mean(1))

    def train(model: nn.Module, optimizer: qd.Riemannian) -> Tensor:
        torch.manual_seed(4)
        for _ in range(3):
            optimizer.zero_grad()
            loss = optimizer.criterion(model(torch.randint(V, (N, L))), torch.randint(V, (N,)))
            loss.backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model = Words()
    optimizer = qd.QDNat(model, qd.Categorical(), lr=0.01, sharing="exact")
    train(model, optimizer)
    whole = copy.deepcopy((model, optimizer))
    again = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    fresh = Words()
    fresh.load_state_dict(again[0])
    resumed = qd.QDNat(fresh, qd.Categorical(), lr=0.01, sharing="exact")
    resumed.load_state_dict(again[1])
    expected = train(model, optimizer)
    assert torch.equal(train(*whole), expected)
    assert torch.equal(train(fresh, resumed), expected)
