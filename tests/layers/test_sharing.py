"""``sharing``: the reduced form by its definition, memory within bounds, and what is refused."""

from __future__ import annotations

import pytest
import torch
from oracle import CLOSE, METRICS, Net, assert_close, moments, step, unit_of, vectors
from torch import Tensor, nn

import quasidiag as qd
from quasidiag import sharing
from quasidiag.moments import Moments

N = 3


def reduced_oracle(a: Tensor, deltas: list[Tensor]) -> Moments:
    """From ``a: [N, S, in]`` and ``delta: [N, S, out]``, sample by sample."""
    m00: Tensor | float = 0.0
    m0i: Tensor | float = 0.0
    mii: Tensor | float = 0.0
    for delta in deltas:
        for n in range(N):
            w, b = delta[n].sum(0) ** 2, a[n].mean(0)
            m00, m0i, mii = m00 + w / N, m0i + torch.outer(w, b) / N, mii + torch.outer(w, b**2) / N
    return Moments(m00, m0i, mii)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
@pytest.mark.parametrize("metric", METRICS)
def test_reduce_on_a_sequence(metric: str, reduction: str) -> None:
    layer = nn.Linear(4, 5)
    model, x, t = Net(layer, 15), torch.randn(N, 3, 4), torch.randint(3, (N,))
    loss = qd.Categorical()
    options = {"sharing": "reduce", "reduction": reduction, "samples": 2}
    optimizer, drawn = step(model, x, t, loss, metric, **options)
    z = layer(x)
    y = model.head(z.tanh().flatten(1))
    deltas = [
        torch.autograd.grad(y, z, u, retain_graph=True)[0]
        for u in vectors(metric, loss, y, t, drawn)
    ]
    assert_close(optimizer.moments(layer), reduced_oracle(x, deltas), reduction)


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "unitwise"])
def test_reduce_of_a_convolution(reduction: str) -> None:
    """A kernel as wide as its stride cuts the input into pieces, each a position of a dense layer."""
    layer = nn.Conv1d(2, 3, 2, stride=2)
    model, x, t = Net(layer, 9), torch.randn(N, 2, 6), torch.randint(3, (N,))
    loss = qd.Categorical()
    optimizer, _ = step(model, x, t, loss, "exact", sharing="reduce", reduction=reduction)
    z = layer(x)
    y = model.head(z.tanh().flatten(1))
    deltas = [
        torch.autograd.grad(y, z, u, retain_graph=True)[0].transpose(1, 2)
        for u in vectors("exact", loss, y, t, [])
    ]
    pieces = x.view(N, 2, 3, 2).permute(0, 2, 1, 3).flatten(2)
    flat = reduced_oracle(pieces, deltas)
    m0i, mii = (m.view(layer.weight.shape) for m in flat[1:])  # type: ignore[union-attr]
    assert_close(optimizer.moments(layer), Moments(flat.m00, m0i, mii))


def test_reduce_of_an_embedding() -> None:
    layer = nn.Embedding(5, 3, padding_idx=0)
    model, t = Net(layer, 12), torch.randint(3, (N,))
    tokens = torch.tensor([[0, 2, 2, 4], [1, 1, 1, 0], [4, 3, 2, 0]])
    loss = qd.Categorical()
    optimizer, _ = step(model, tokens, t, loss, "exact", sharing="reduce")
    z = layer(tokens)
    y = model.head(z.tanh().flatten(1))
    deltas = [
        torch.autograd.grad(y, z, u, retain_graph=True)[0] for u in vectors("exact", loss, y, t, [])
    ]
    one_hot = nn.functional.one_hot(tokens, 5).double()
    one_hot[..., 0] = 0
    expected = reduced_oracle(one_hot, deltas).mii
    assert expected is not None
    torch.testing.assert_close(optimizer.moments(layer).mii, expected.T, **CLOSE)


@pytest.mark.parametrize("kind", ["exact", "reduce"])
def test_memory_stays_within_the_budget(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of a sample or two gives the same moments, and never asks for more at once."""
    layer = nn.Conv2d(2, 3, 3, padding=1)
    model, x, t = Net(layer, 48), torch.randn(7, 2, 4, 4), torch.randint(3, (7,))
    whole, _ = step(model, x, t, qd.Categorical(), "outer-product", sharing=kind)
    model.zero_grad()
    seen: list[int] = []
    adapter = type(qd.layers.adapter_of(layer))
    plain = adapter.patches

    def patches(self: object, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        found = plain(self, module, a, g)
        seen.append(found[0].numel())
        return found

    one = 16 * 18  # positions × inputs
    monkeypatch.setattr(adapter, "patches", patches)
    monkeypatch.setattr(sharing, "BUDGET", 2 * (one + 3 * layer.weight.numel()))
    parts, _ = step(model, x, t, qd.Categorical(), "outer-product", sharing=kind)
    assert_close(parts.moments(layer), whole.moments(layer))
    assert max(seen) == 2 * one
    assert len(seen) == 5  # one to see how large they are, then two, two, two and one


def test_a_budget_below_one_sample_takes_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 5)
    model, x, t = Net(layer, 10), torch.randn(N, 2, 4), torch.randint(3, (N,))
    whole, _ = step(model, x, t, qd.Categorical(), "exact", sharing="exact")
    model.zero_grad()
    monkeypatch.setattr(sharing, "BUDGET", 1)
    parts, _ = step(model, x, t, qd.Categorical(), "exact", sharing="exact")
    assert_close(parts.moments(layer), whole.moments(layer))


def test_exact_sharing_accumulates_like_one_batch() -> None:
    def run(k: int) -> Moments:
        torch.manual_seed(3)
        layer = nn.Linear(4, 5)
        model, x, t = Net(layer, 10), torch.randn(4, 2, 4), torch.randint(3, (4,))
        with qd.QDOP(model, qd.Categorical(), lr=0.0, sharing="exact") as optimizer:
            for part, target in zip(x.chunk(k), t.chunk(k), strict=True):
                (optimizer.criterion(model(part), target) / k).backward()
            optimizer.step()
        return optimizer.moments(layer)

    assert_close(run(2), run(1))
    assert_close(run(4), run(1))


def test_exact_moments_do_not_depend_on_what_activities_are_measured_from() -> None:
    torch.manual_seed(0)
    x, t, found = torch.randn(N, 3, 4), torch.randint(3, (N,)), []
    for shift in (0.0, 2.0):
        torch.manual_seed(1)
        layer = nn.Linear(4, 5)
        model, loss = Net(layer, 15), qd.Categorical()
        optimizer = qd.Riemannian(model, loss, lr=0.0, gamma=1.0, sharing="exact")
        for _ in range(2):  # the metric is that of the second step
            loss(model(x), t).backward()
            optimizer.step()
            optimizer.state[layer.weight]["shift"].fill_(shift)
        found.append(optimizer._owner[layer].moments(optimizer.state))
    assert_close(*found)


def test_a_layer_called_twice_sums_before_it_squares() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.layer(x).tanh()).tanh())

    model, x, t, loss = Twice(), torch.randn(N, 4), torch.randint(3, (N,)), qd.Categorical()
    for metric in ("outer-product", "exact"):
        optimizer, _ = step(model, x, t, loss, metric, sharing="exact")
        y = model(x)
        vs = vectors(metric, loss, y, t, [])
        pair = [model.layer.weight, model.layer.bias]
        found = [
            list(torch.autograd.grad((y[n] * u[n]).sum(), pair, retain_graph=True))
            for u in vs
            for n in range(N)
        ]
        expected = moments(found, N, unit_of(model.layer, model.layer.weight))
        assert_close(optimizer.moments(model.layer), expected)
        model.zero_grad()


def test_custom_layers_without_patches() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.bias

    @qd.register_layer(Scale)
    class ScaleAdapter(qd.Adapter):
        def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
            return (a * g).reshape(-1, 4).sum(0)

        def rows(self, module: nn.Module, weight: Tensor) -> Tensor:
            return weight.unsqueeze(-1)

    layer = Scale()
    model, x, t, loss = (
        Net(layer, 8),
        torch.randn(N, 2, 4),
        torch.randint(3, (N,)),
        qd.Categorical(),
    )
    optimizer, _ = step(model, x, t, loss, "exact", sharing="exact")
    y = model(x)
    vs = vectors("exact", loss, y, t, [])
    found = [
        list(
            torch.autograd.grad((y[n] * u[n]).sum(), [layer.weight, layer.bias], retain_graph=True)
        )
        for u in vs
        for n in range(N)
    ]
    assert_close(optimizer.moments(layer), moments(found, N, torch.arange(4)))
    with pytest.raises(ValueError, match=r"sharing='reduce' needs Adapter.patches"):
        qd.QDOP(model, lr=0.1, sharing="reduce")
    with pytest.raises(ValueError, match=r"unitwise reduction needs Adapter.patches"):
        qd.Riemannian(model, lr=0.1, reduction="unitwise")


@pytest.mark.parametrize("kind", ["exact", "reduce", "expand"])
def test_a_batch_that_is_not_first_is_told_before_anything_moves(kind: str) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).mean(0)

    model, loss = Flat(), qd.Categorical()
    before = [p.clone() for p in model.parameters()]
    fraction = 0.5 if kind == "expand" else 1.0
    for metric in ("outer-product", "exact"):
        options = {"metric": metric, "sharing": kind, "metric_fraction": fraction}
        with (
            qd.Riemannian(model, loss, lr=0.1, **options),  # type: ignore[arg-type]
            pytest.raises(ValueError, match="keep the batch dimension first"),
        ):
            loss(model(torch.randn(N, 5, 4)), torch.randint(3, (N,))).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("times", [4, 5])
def test_positions_are_no_samples(times: int) -> None:
    """A table that is looked up once for all samples has a metric for all of its rows, whatever the share."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.out = nn.Embedding(times, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + self.place(torch.arange(times)))

    model, loss = Places(), qd.Categorical()
    for metric in ("outer-product", "exact"):
        with qd.Riemannian(model, loss, lr=0.1, metric=metric, metric_fraction=0.5) as optimizer:
            loss(model(torch.randn(4, times, 3)), torch.randint(3, (4, times))).backward()
            optimizer.step()
            moments = optimizer.moments(model.place)
            assert moments.mii is not None and bool((moments.mii > 0).all())


def test_arguments() -> None:
    with pytest.raises(ValueError, match="sharing must be one of"):
        qd.QDOP(nn.Linear(2, 2), lr=0.1, sharing="all")
    with pytest.raises(ValueError, match="backpropagated metric"):
        qd.Riemannian(
            nn.Linear(2, 2), qd.Gaussian(), lr=0.1, metric="backpropagated", sharing="exact"
        )
