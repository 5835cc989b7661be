"""On a linear-Gaussian model the unitwise natural gradient with lr = 1 is least squares, in one step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import digits


def one_step(x: Tensor, t: Tensor, std: float, reduction: str, metric: str = "exact") -> nn.Linear:
    model = nn.Linear(x.shape[1], t.shape[1], dtype=torch.float64)
    loss = qd.Gaussian(std).double()
    optimizer = qd.Riemannian(
        model, loss, lr=1.0, metric=metric, reduction=reduction, eps=0.0, floor=0.0
    )
    loss(model(x), t).backward()
    optimizer.step()
    return model


def least_squares(x: Tensor, t: Tensor) -> Tensor:
    design = torch.cat([torch.ones_like(x[:, :1]), x], dim=1)
    return torch.linalg.lstsq(design, t).solution.T


def case() -> tuple[Tensor, Tensor]:
    """Real pixels: ten of the most varying ones predict three others."""
    x, _ = digits()
    pixels = x.var(0).argsort(descending=True)[:130:10]
    return x[:400, pixels[:10]].contiguous(), x[:400, pixels[10:]].contiguous()


@pytest.mark.parametrize("metric", ["exact", "backpropagated"])
@pytest.mark.parametrize("std", [1.0, 0.25])
def test_unitwise_solves_least_squares_in_one_step(std: float, metric: str) -> None:
    x, t = case()
    model = one_step(x, t, std, "unitwise", metric)
    solution = least_squares(x, t)
    torch.testing.assert_close(model.bias.detach(), solution[:, 0], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(model.weight.detach(), solution[:, 1:], rtol=1e-8, atol=1e-10)


def test_quasi_diagonal_does_so_for_one_input_and_not_for_correlated_ones() -> None:
    x, t = case()
    for columns, exact in (([4], True), (list(range(10)), False)):
        model = one_step(x[:, columns], t, 1.0, "quasi-diagonal")
        solution = least_squares(x[:, columns], t)
        same = torch.allclose(model.weight.detach(), solution[:, 1:], rtol=1e-8)
        assert same == exact


def test_a_constant_input_is_left_where_it_was() -> None:
    """The bias and a constant input explain the same thing; the others are solved for all the same."""
    x, t = case()
    black = torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)
    model = nn.Linear(11, 3, dtype=torch.float64)
    before = model.weight[:, -1].detach().clone()
    loss = qd.Gaussian().double()
    optimizer = qd.Riemannian(
        model, loss, lr=1.0, metric="exact", reduction="unitwise", eps=0.0, floor=0.0
    )
    loss(model(black), t).backward()
    optimizer.step()
    torch.testing.assert_close(model.weight[:, -1].detach(), before, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        model.weight[:, :-1].detach(), least_squares(x, t)[:, 1:], rtol=1e-8, atol=1e-10
    )
