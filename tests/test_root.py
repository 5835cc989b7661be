"""The root of a metric against dense matrices, float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quasidiag import root
from quasidiag.reference import completion

UNITS, INPUTS = 4, 3


def moments() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Moments measured from a shift, of weighted samples."""
    random = torch.Generator().manual_seed(0)
    a = torch.randn(50, INPUTS, generator=random, dtype=torch.float64) + 2
    w = torch.rand(50, UNITS, generator=random, dtype=torch.float64)
    shift = torch.randn(INPUTS, generator=random, dtype=torch.float64)
    return w.sum(0), w.T @ (a - shift), w.T @ (a - shift).square(), shift


def vectors() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    v = torch.randn(UNITS, 1 + INPUTS, generator=random, dtype=torch.float64)
    return v[:, 0], v[:, 1:]


def dense(m00: Tensor, m0i: Tensor, mii: Tensor, shift: Tensor | None, unit: int) -> Tensor:
    block = completion(torch.cat([m00[unit : unit + 1], mii[unit]]), m0i[unit])
    back = torch.eye(1 + INPUTS, dtype=torch.float64)
    if shift is not None:
        back[1:, 0] = shift
    return back @ block @ back.T


@pytest.mark.parametrize("shifted", [True, False])
def test_a_root_of_the_quasi_diagonal_metric(shifted: bool) -> None:
    m00, m0i, mii, shift = moments()
    point = shift if shifted else None
    half = root.quasi_diagonal(m00, m0i, mii, point)
    v = torch.cat([vectors()[0].unsqueeze(1), vectors()[1]], dim=1)
    u = half.gradient([*vectors()])
    step = torch.cat([half.step(u)[0].unsqueeze(1), half.step(u)[1]], dim=1)
    for unit in range(UNITS):
        metric = dense(m00, m0i, mii, point, unit)
        torch.testing.assert_close(step[unit], torch.linalg.solve(metric, v[unit]))
        torch.testing.assert_close(u[unit] @ u[unit], v[unit] @ step[unit])
    torch.testing.assert_close(half.coordinates(half.step(u)), u)


@pytest.mark.parametrize("bias", [True, False])
def test_a_root_of_the_diagonal_metric(bias: bool) -> None:
    m00, _, mii, _ = moments()
    half = root.diagonal(m00 if bias else None, mii)
    v, m = [*vectors()][not bias :], [m00, mii][not bias :]
    u = half.gradient(v)
    torch.testing.assert_close(half.step(u), [x / y for x, y in zip(v, m)])
    torch.testing.assert_close(half.coordinates(half.step(u)), u)


def test_what_has_never_varied_does_not_move() -> None:
    m00, m0i, mii, _ = moments()
    m00[0], m0i[0], mii[0] = 0.0, 0.0, 0.0
    m0i[1, 0] = mii[1, 0] = m00[1]  # an input that is always 1
    half = root.quasi_diagonal(m00, m0i, mii, None)
    w0, wi = half.step(half.gradient([*vectors()]))
    assert half.coordinates([w0, wi]).isfinite().all()
    assert w0[0] == 0 and wi[0].abs().max() == 0 and wi[1, 0] == 0
    assert wi[1, 1] != 0 and w0.isfinite().all() and wi.isfinite().all()
