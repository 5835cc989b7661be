"""Asking for derivatives above the lowest activation, and below it: the same metric."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from quasidiag import asking, kernels
from quasidiag.kernels import native


class Twice(nn.Module):
    """Its first layer's output goes through an activation and past it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 30), nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.second(z.sigmoid() + z)


def plain(activation: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(20, 30), activation(), nn.Linear(30, 25), activation(), nn.Linear(25, 5)
    )


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Softplus": nn.Softplus,
    "ELU": nn.ELU,
    "LeakyReLU": nn.LeakyReLU,
    "Mish": nn.Mish,
}


def moments(make: Callable[[], nn.Module], fraction: float) -> list[Tensor]:
    torch.manual_seed(0)
    model, criterion = make().double(), qd.Categorical()
    optimizer = qd.QDNat(model, criterion, lr=1e-3, metric_fraction=fraction)
    for _ in range(2):
        x = torch.randn(16, 20, dtype=torch.float64)
        optimizer.zero_grad()
        criterion(model(x), torch.randint(0, 5, (16,))).backward()
        optimizer.step()
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    found = [m for layer in layers for m in optimizer.moments(layer)]
    return [m for m in found if m is not None]


def weakened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls where a slope was pulled out."""
    calls: list[int] = []
    real = kernels.weaken_

    def counted(w: Tensor, slope: Tensor) -> None:
        calls.append(len(w))
        real(w, slope)

    monkeypatch.setattr(kernels, "weaken_", counted)
    return calls


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
def test_above_the_activation_is_below_it_times_the_slope(
    activation: Callable[[], nn.Module], fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = weakened(monkeypatch)
    fast = moments(plain(activation), fraction)
    assert calls == [16 * fraction] * 2  # one layer, two steps
    monkeypatch.setattr(asking, "ELEMENTWISE", set())
    slow = moments(plain(activation), fraction)
    assert len(calls) == 2
    for got, want in zip(fast, slow, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("make", [Twice, plain(lambda: nn.Softmax(-1))], ids=["past", "softmax"])
def test_what_is_not_one_activation_alone_is_asked_below(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = weakened(monkeypatch)
    fast = moments(make, 1.0)
    monkeypatch.setattr(asking, "ELEMENTWISE", set())
    assert calls == []
    assert all(torch.equal(x, y) for x, y in zip(fast, moments(make, 1.0), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weaken(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w, slope = torch.rand(70, 90, dtype=dtype), torch.randn(70, 90, dtype=dtype)
    w[0, 0], slope[0, 0] = 1e-20, 1e-9 if dtype == torch.float32 else 1e-150
    want = w.double() * slope.double().square()
    want[0, 0] = 0.0
    assert native.library() is None or native.weaken_(w.clone(), slope) is (dtype == torch.float32)
    kernels.weaken_(w, slope)
    torch.testing.assert_close(w.double(), want, rtol=1e-6, atol=0)
