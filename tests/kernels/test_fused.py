"""The Triton kernels against the eager oracle in float64: on a GPU, or on a CPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quasidiag import moments, reductions
from quasidiag.kernels import gpu
from quasidiag.kernels.rule import Rule
from quasidiag.moments import Moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not gpu.interpreted(), reason="neither a GPU nor the interpreter"
)
ROWS, N = 5, 2100  # more than one block of a row, and no multiple of it


def block(shifted: bool = True) -> dict[str, Tensor]:
    """Moments of real samples, so that they are consistent, and a gradient."""
    g = torch.Generator().manual_seed(0)
    a = torch.rand(64, N, generator=g) + 0.5
    a[:, 3] = 0.25  # an input that never varies
    w = torch.rand(64, ROWS, generator=g)
    w[:, 2] = 0.0  # a unit that never had a derivative
    shift = a.mean(0)
    c = a - shift if shifted else a
    found = {
        "m00": w.mean(0),
        "m0i": w.T @ c / 64,
        "mii": w.T @ c.square() / 64,
        "v0": torch.randn(ROWS, generator=g),
        "vi": torch.randn(ROWS, N, generator=g),
        "shift": shift,
    }
    return {name: t.to(DEVICE) for name, t in found.items()}


def oracle(b: dict[str, Tensor], eps: float, floor: float, shifted: bool) -> tuple[Tensor, Tensor]:
    d = {name: t.double() for name, t in b.items()}
    shift = d.pop("shift")
    return reductions.quasi_diagonal(**d, eps=eps, floor=floor, shift=shift if shifted else None)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(("eps", "floor"), [(1e-4, 1e-4), (1e-4, 0.0), (1e-3, 0.05)])
def test_quasi_diagonal_solve(shifted: bool, eps: float, floor: float) -> None:
    b = block(shifted)
    w = [torch.full_like(b[name], torch.nan) for name in ("v0", "vi")]
    shift = b["shift"] if shifted else None
    five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
    assert gpu.quasi_diagonal(*five, shift, Rule(eps=eps, floor=floor), w=w)
    for got, want in zip(w, oracle(b, eps, floor, shifted)):
        assert distance(got, want) < 1e-4


def test_units_of_one_weight() -> None:
    b = {name: t[:, :1].contiguous() if t.dim() == 2 else t for name, t in block().items()}
    b["shift"] = b["shift"][:1].contiguous()
    w = [torch.full_like(b[name], torch.nan) for name in ("v0", "vi")]
    five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
    assert gpu.quasi_diagonal(*five, b["shift"], Rule(eps=1e-4, floor=1e-4), w=w)
    for got, want in zip(w, oracle(b, 1e-4, 1e-4, True)):
        assert distance(got, want) < 1e-4


@pytest.mark.parametrize("tensor_lr", [True, False])
def test_quasi_diagonal_step_with_momentum_and_decay(tensor_lr: bool) -> None:
    b = block()
    lr = torch.tensor(0.1, device=DEVICE) if tensor_lr else 0.1
    rule = Rule(lr=lr, decay=0.9, momentum=0.7, eps=1e-3, floor=1e-3, scale=-0.5)
    like = [b["v0"], b["vi"]]
    theta, buffer = ([torch.randn_like(x) for x in like] for _ in range(2))
    thetas, buffers = [x.clone() for x in theta], [x.clone() for x in buffer]
    five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
    assert gpu.quasi_diagonal(*five, b["shift"], rule, buffers=buffers, thetas=thetas)
    b["v0"], b["vi"] = -0.5 * b["v0"], -0.5 * b["vi"]
    for i, w in enumerate(oracle(b, 1e-3, 1e-3, True)):
        want = 0.7 * buffer[i] + w
        assert distance(buffers[i], want) < 1e-4
        assert distance(thetas[i], 0.9 * theta[i] - 0.1 * want) < 1e-4


def test_no_step_where_nothing_varies() -> None:
    b = block()
    w = [torch.empty_like(b[name]) for name in ("v0", "vi")]
    five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
    assert gpu.quasi_diagonal(*five, b["shift"], Rule(eps=0.0, floor=0.0), w=w)
    assert (w[1][:, 3] == 0).all()
    assert (w[1][2] == 0).all() and w[0][2] == 0


@pytest.mark.parametrize(("eps", "floor"), [(1e-8, 1e-8), (0.0, 0.0), (1e-3, 0.3)])
def test_diagonal(eps: float, floor: float) -> None:
    m = torch.rand(20, 99, device=DEVICE)
    m[7] = 0.0
    v, theta, buffer = torch.randn(3, 20, 99, device=DEVICE).unbind()
    rule = Rule(lr=0.3, decay=0.5, momentum=0.9, eps=eps, floor=floor)
    w = torch.empty_like(m)
    assert gpu.diagonal([m], [v], rule, w=[w])
    want = reductions.diagonal(m.double(), v.double(), eps=eps, floor=floor)
    assert distance(w, want) < 1e-6
    expected = 0.5 * theta - 0.3 * (0.9 * buffer + w)
    assert gpu.diagonal([m], [v], rule, buffers=[buffer], thetas=[theta])
    assert distance(theta, expected.double()) < 1e-6


@pytest.mark.parametrize("tensor_scale", [True, False])
def test_square(tensor_scale: bool) -> None:
    delta = torch.randn(30, 99, device=DEVICE)
    delta[0, 0], delta[0, 1], delta[0, 2] = 1e-18, 1e-21, torch.nan
    scale = torch.tensor(3.0, device=DEVICE) if tensor_scale else 3.0
    got = gpu.square(delta, scale)
    want = moments.square(3.0 * delta, torch.float32)
    assert got is not None
    torch.testing.assert_close(got, want, equal_nan=True)
    assert gpu.square(delta, scale, onto=got) is got
    torch.testing.assert_close(got, 2 * want, equal_nan=True)


def test_square_of_half_precision_keeps_float32s_range() -> None:
    delta = torch.full((8, 8), 2.0**-13, dtype=torch.float16, device=DEVICE)
    got = gpu.square(delta, 2.0**-30)
    assert got is not None and got.dtype == torch.bfloat16
    assert (got == 2.0**-86).all()


@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("kept", ["quasi-diagonal", "diagonal"])
@pytest.mark.parametrize("tensor_gain", [True, False])
@pytest.mark.parametrize("small", [True, False])
def test_products(
    dtype: torch.dtype,
    inputs: torch.dtype,
    kept: str,
    tensor_gain: bool,
    small: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = gpu.fused()
    assert kernels is not None
    monkeypatch.setattr(kernels, "SMALL", 2**30 if small else 0)
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("only cuBLAS sums products of bfloat16 into float32")
    quasi = kept == "quasi-diagonal"
    a = (torch.rand(150, 83, device=DEVICE) + 1).to(inputs)
    w = torch.rand(150, 71, device=DEVICE).to(dtype)
    shift = a.float().mean(0) if quasi else None
    into = Moments(
        torch.rand(71, device=DEVICE),
        torch.rand(71, 83, device=DEVICE) if quasi else None,
        torch.rand(71, 83, device=DEVICE),
    )
    wide, c = w.double(), a.double() - (0 if shift is None else shift.double())
    sums = Moments(wide.sum(0), wide.T @ c, wide.T @ c.square())
    want = [None if m is None else 0.9 * m.double() + 0.1 * s for m, s in zip(into, sums)]
    gain = torch.tensor(0.1, device=DEVICE) if tensor_gain else 0.1
    assert gpu.accumulate_(into, a, w, shift, 0.9, gain)
    for got, expected in zip(into, want):
        if got is not None:
            assert expected is not None
            assert distance(got, expected) < (5e-3 if dtype is torch.bfloat16 else 1e-5)


def test_declines_what_it_cannot_do() -> None:
    big = torch.rand(20, 20, device=DEVICE)
    assert gpu.square(big.double(), 1.0) is None
    assert gpu.square(big.T, 1.0) is None
    assert not gpu.diagonal([big.double()], [big], Rule(), w=[big])
