"""Training with the compiled kernels is training without them, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from quasidiag import blocks, kernels
from quasidiag.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.1},
    "up": {"maximize": True, "lr": 1e-4},
    "tensor lr": {"lr": torch.tensor(1e-3)},
    "share": {"metric_fraction": 0.8},
    "seldom": {"metric_every": 2, "momentum": 0.5},
}


def trained(kind: type[qd.Riemannian], options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 80), nn.Sigmoid(), nn.Linear(80, 64), nn.Tanh(), nn.Linear(64, 7)
    )
    criterion = qd.Categorical()
    optimizer = kind(model, criterion, **{"lr": 1e-3, "eps": 1e-4, "seed": 0, **options})
    for _ in range(5):
        x, t = torch.rand(90, 64), torch.randint(0, 7, (90,))
        optimizer.zero_grad()
        criterion(model(x), t).backward()
        optimizer.step()
    momenta = [s["momentum"] for s in optimizer.state.values() if "momentum" in s]
    return [*(p.detach() for p in model.parameters()), *momenta]


@pytest.mark.parametrize(
    "kind", [qd.DOP, qd.QDOP, qd.DMCNat, qd.QDMCNat, qd.DNat, qd.QDNat], ids=lambda k: k.__name__
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("products", ["ours", "torch's"])
def test_the_compiled_path_trains_as_the_eager_one(
    kind: type[qd.Riemannian],
    options: dict[str, Any],
    products: str,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "multiplies", lambda: products == "ours")
    fast = trained(kind, options)
    solve = "qd_quasi_diagonal" if kind.__name__.startswith("Q") else "qd_diagonal"
    moments = "qd_products" if products == "ours" else "qd_centre"
    assert {solve, moments, "qd_finite"} <= set(calls)
    many = kind.__name__.endswith(
        "DNat"
    )  # our own product squares a single vector's derivatives itself
    assert ("qd_square" in calls) is (many or products != "ours")
    monkeypatch.setattr(native, "LEAST", 2**60)
    calls.clear()
    eager = trained(kind, options)
    assert {*calls} == {"qd_finite"}
    for a, b in zip(fast, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4 * float(b.abs().max()))


def test_no_kernel_takes_a_step_of_langevin(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would leave out the noise and the prior."""

    def sampled() -> list[Tensor]:
        torch.manual_seed(0)
        model, criterion = nn.Linear(80, 64), qd.Categorical()
        optimizer = qd.Langevin(model, criterion, lr=1e-2, data_size=90)
        for _ in range(5):
            optimizer.zero_grad()
            criterion(model(torch.randn(90, 80)), torch.randint(0, 64, (90,))).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    fast = sampled()
    assert "qd_finite" in calls and "qd_quasi_diagonal" not in calls
    monkeypatch.setattr(native, "LEAST", 2**60)
    for a, b in zip(fast, sampled(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4 * float(b.abs().max()))


@pytest.mark.parametrize("kind", [qd.DOP, qd.QDOP, qd.DNat, qd.QDMCNat], ids=lambda k: k.__name__)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"metric_every": 2}])
def test_moments_and_step_at_once_are_one_after_the_other(
    kind: type[qd.Riemannian], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "multiplies", lambda: True)
    monkeypatch.setattr(blocks, "TIDY_EVERY", 3)
    done: list[bool] = []
    real = kernels.advance_

    def counted(*arguments: Any) -> bool:
        done.append(real(*arguments))
        return done[-1]

    monkeypatch.setattr(kernels, "advance_", counted)
    fused = trained(kind, options)
    assert any(done)
    monkeypatch.setattr(kernels, "advance_", lambda *arguments: False)
    for a, b in zip(fused, trained(kind, options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


@pytest.mark.parametrize("kind", [qd.DOP, qd.QDOP], ids=lambda k: k.__name__)
def test_autograd_notices_the_kernels_writes(kind: type[qd.Riemannian]) -> None:
    model = nn.Sequential(nn.Linear(64, 80), nn.Sigmoid(), nn.Linear(80, 7))
    criterion = qd.Categorical()
    optimizer = kind(model, criterion, lr=1e-3)
    x, t = torch.rand(90, 64), torch.randint(0, 7, (90,))
    criterion(model(x), t).backward()
    stale = model(x.requires_grad_()).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
