"""The paper's counter-example: on a noise-free quadratic the outer product fails, the natural gradient contracts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd

LR = 0.1


def train(maker: type[qd.Riemannian], steps: int, x: Tensor, t: Tensor, bias: bool) -> Tensor:
    """The largest error of the outputs, before training and after every step."""
    model = nn.Linear(x.shape[1], t.shape[1], bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    loss = qd.Gaussian(1.0).double()
    optimizer = maker(model, loss, lr=LR, gamma=1.0, eps=0.0, floor=0.0)
    errors = []
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x)
        errors.append((y - t).abs().max().detach())
        loss(y, t).backward()
        optimizer.step()
    return torch.stack(errors)


def quadratic(maker: type[qd.Riemannian], steps: int) -> Tensor:
    """One weight θ, one sample x = 1, target 0: the loss is θ²/2, and `errors` is |θ|."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return train(maker, steps, one, 0 * one, bias=False)


@pytest.mark.parametrize("maker", [qd.DNat, qd.QDNat])
def test_natural_gradient_contracts_at_one_minus_eta(maker: type[qd.Riemannian]) -> None:
    theta = quadratic(maker, 100)
    expected = (1 - LR) ** torch.arange(100, dtype=torch.float64)
    torch.testing.assert_close(theta, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("maker", [qd.DOP, qd.QDOP])
def test_outer_product_never_converges(maker: type[qd.Riemannian]) -> None:
    """θ ← θ − η/θ: of any two steps in a row one is at least √(η/2) away from the optimum."""
    theta = quadratic(maker, 300)
    pairs = torch.maximum(theta[1:], theta[:-1])
    assert pairs.min() >= math.sqrt(LR / 2) * (1 - 1e-9)
    assert theta[-100:].max() > 1e3 * quadratic(qd.QDNat, 300)[-1]


def test_with_a_bias_and_one_input_the_reduction_is_the_whole_metric() -> None:
    """A noise-free straight line: all errors shrink by exactly 1 − η a step, none with the outer product."""
    x = torch.linspace(-1, 4, 9, dtype=torch.float64).unsqueeze(1)
    t = torch.cat([3 * x - 2, 0.5 * x + 7], dim=1)
    errors = train(qd.QDNat, 100, x, t, bias=True)
    torch.testing.assert_close(errors[1:] / errors[:-1], torch.full((99,), 1 - LR).double())
    assert train(qd.QDOP, 100, x, t, bias=True)[-20:].max() > 10 * errors[-1]
