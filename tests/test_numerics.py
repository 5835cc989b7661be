"""Float32 close to float64 far from centred inputs, constant inputs, denormals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import criterion, digits, mlp
from quasidiag import reference
from quasidiag.blocks import TIDY_EVERY


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def run(model: nn.Module, x: Tensor, t: Tensor, steps: int, **options: object) -> qd.Riemannian:
    """`steps` metric updates on slices of the data, at parameters that stay where they are."""
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=0.0, gamma=0.1, **options)
    size = len(x) // steps
    for step in range(steps):
        optimizer.zero_grad()
        rows = slice(step * size, (step + 1) * size)
        loss(model(x[rows]), t[rows]).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("metric", ["outer-product", "exact"])
@pytest.mark.parametrize("ratio", [0, 1, 100, 1000])
def test_float32_is_close_to_float64(ratio: float, metric: str) -> None:
    """Inputs with a mean up to 1,000 times their standard deviation."""
    torch.manual_seed(0)
    noise = torch.randn(400, 6, dtype=torch.float64)
    x32 = (noise + ratio * torch.tensor([1, -1, 1, -0.5, 0.2, 1])).float()
    t = torch.randint(4, (400,))
    narrow = nn.Linear(6, 4)
    with torch.no_grad():
        # Outputs of the order of one, whatever the inputs' mean: what is tested is the metric.
        narrow.weight.mul_(0.1)
        narrow.bias.copy_(-narrow.weight @ x32.mean(0))
    wide = nn.Linear(6, 4, dtype=torch.float64)
    wide.load_state_dict(narrow.state_dict())
    # The very same derivatives reach both, so that only the metric and the solve differ.
    one = run(narrow, x32, t, 5, metric=metric)
    other = run(wide, x32.double(), t, 5, metric=metric)
    for field in ("m00", "m0i", "mii"):
        got, want = getattr(one.moments(narrow), field), getattr(other.moments(wide), field)
        assert relative(got, want) < 1e-3
    v = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    # A gradient of the block as data make it: v_i = ‹δ a_i›, so mostly the mean times v_0.
    vi = v[0] + x32.double().mean(0) * v[1].unsqueeze(1)
    for model in (narrow, wide):
        model.weight.grad, model.bias.grad = vi.to(model.weight.dtype), v[1].to(model.weight.dtype)
    with torch.no_grad():
        one_w, other_w = (dict(o._directions()) for o in (one, other))
    assert relative(one_w[narrow.weight], other_w[wide.weight]) < 1e-3
    assert relative(one_w[narrow.bias], other_w[wide.bias]) < 1e-3


@pytest.mark.parametrize("metric", ["outer-product", "monte-carlo", "exact", "backpropagated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [0.0, 1.0, 0.1, -3.7])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_an_input_that_never_varies_gets_no_step(
    level: float, dtype: torch.dtype, metric: str, eps: float
) -> None:
    """A border pixel, black or white, in steps of real digits; the rest trains on."""
    x, t = digits()
    lit = ((x > 0).double().mean(0) > 0.3).nonzero().flatten()[::8]
    x = torch.cat([x[:, lit], torch.full((len(x), 2), level, dtype=x.dtype)], dim=1).to(dtype)
    model, loss = mlp(x.shape[1], 6, 10).to(dtype), criterion("categorical")
    before = model[0].weight.detach().clone()
    optimizer = qd.Riemannian(model, loss, lr=1e-3, gamma=0.1, metric=metric, eps=eps, floor=eps)
    for step in range(5):
        rows = slice(200 * step, 200 * step + 200)
        optimizer.zero_grad()
        loss(model(x[rows]), t[rows]).backward()
        optimizer.step()
    moved = (model[0].weight - before).abs()
    assert torch.isfinite(moved).all()
    assert (moved[:, -2:] == 0).all()
    assert (moved[:, :-2] > 0).all()


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal"])
def test_no_denormal_is_left_in_the_state(reduction: str) -> None:
    """Saturated units: deltas of 1e-22, whose squares are denormal or nothing in float32."""
    tiny = torch.finfo(torch.float32).tiny
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        model[2].weight.mul_(torch.logspace(-25, 0, 6))
    optimizer = qd.Riemannian(model, lr=0.0, gamma=0.3, reduction=reduction)
    # In between a few may come, where nearly equal numbers are subtracted.
    for step in range(2 * TIDY_EVERY):
        optimizer.zero_grad()
        x = torch.rand(16, 8) if step < 4 else torch.zeros(16, 8)
        nn.functional.cross_entropy(model(x), torch.zeros(16, dtype=torch.long)).backward()
        optimizer.step()
    for state in optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and value.is_floating_point():
                assert not ((value != 0) & (value.abs() < tiny)).any(), name


def test_the_centred_form_survives_where_products_of_moments_underflow() -> None:
    """Second moments of 1e-25 have products of 1e-50, which float32 does not know."""
    torch.manual_seed(0)
    g = 1e-12 * torch.randn(50, 1, dtype=torch.float64)
    g = g * torch.cat([torch.ones(50, 1), 2 + torch.randn(50, 4)], dim=1)
    full, v = g.T @ g / 50, g.mean(0)
    diagonal, row = full.diagonal(), full[0, 1:]
    assert (diagonal.float() * diagonal[0].float() == 0).all()
    want = reference.qd_solve(diagonal.tolist(), row.tolist(), v.tolist(), 0.0, 0.0)
    got = qd.qd_solve(diagonal.float(), row.float(), v.float(), eps=0.0, floor=0.0)
    assert relative(got, torch.tensor(want, dtype=torch.float64)) < 1e-3
