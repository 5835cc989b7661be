"""The solve against the dense inverse of the completion and against Algorithm 1 in scalar loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quasidiag as qd
from quasidiag import reference


def metric(n: int, samples: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonal, bias row and gradient of a block made of real per-sample gradients, not centred."""
    generator = torch.Generator().manual_seed(seed)
    a = 2 + torch.randn(samples, n, generator=generator, dtype=torch.float64)
    delta = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    g = delta * torch.cat([torch.ones(samples, 1, dtype=torch.float64), a], dim=1)
    full = g.T @ g / samples
    return full.diagonal().clone(), full[0, 1:].clone(), g.mean(0)


@pytest.mark.parametrize("n", [1, 2, 7, 30])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-2])
def test_the_solve_inverts_the_completion(n: int, eps: float) -> None:
    diagonal, row, v = metric(n)
    dense = reference.completion(diagonal + eps, row)
    torch.testing.assert_close(
        qd.qd_solve(diagonal, row, v, eps=eps, floor=0.0),
        torch.linalg.solve(dense, v),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("n", [1, 2, 7, 30])
@pytest.mark.parametrize("floor", [None, 0.0, 1e-3, 10.0])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-1])
def test_the_solve_is_algorithm_1(n: int, eps: float, floor: float | None) -> None:
    diagonal, row, v = metric(n)
    expected = reference.qd_solve(diagonal.tolist(), row.tolist(), v.tolist(), eps, floor)
    torch.testing.assert_close(
        qd.qd_solve(diagonal, row, v, eps=eps, floor=floor),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-10,
        atol=1e-10,
    )


def test_the_completion_is_positive_definite_where_the_arrow_matrix_is_not() -> None:
    diagonal, row, _ = metric(30)
    arrow = torch.diag(diagonal)
    arrow[0, 1:] = arrow[1:, 0] = row
    assert torch.linalg.eigvalsh(arrow)[0] < 0
    assert torch.linalg.eigvalsh(reference.completion(diagonal, row))[0] > 0


def test_floor_bounds_the_denominator_and_eps_is_added_to_the_diagonal_only() -> None:
    diagonal, row, v = (
        torch.tensor(z, dtype=torch.float64) for z in ([2.0, 3.0], [1.0], [1.0, 4.0])
    )
    solve = qd.qd_solve
    # Δ0 Δ1 − r² = 5: a floor below it does nothing, one above it takes its place.
    w1 = (2 * 4 - 1 * 1) / 5
    assert solve(diagonal, row, v, eps=0.0, floor=4.9)[1].item() == pytest.approx(w1, abs=1e-12)
    w1 = (2 * 4 - 1 * 1) / 50
    w = solve(diagonal, row, v, eps=0.0, floor=50.0)
    assert w.tolist() == pytest.approx([(1 - w1) / 2, w1], abs=1e-12)
    # eps = 1 turns (2, 3) into (3, 4) and leaves r: 3·4 − 1 = 11. Without a floor it is eps, far below.
    w1 = (3 * 4 - 1 * 1) / 11
    assert solve(diagonal, row, v, eps=1.0).tolist() == pytest.approx([(1 - w1) / 3, w1], abs=1e-12)
    assert solve(diagonal, row, v, eps=20.0)[1].item() == pytest.approx(
        (22 * 4 - 1) / (22 * 23 - 1), abs=1e-12
    )


def test_floor_none_is_eps() -> None:
    diagonal, row, v = metric(5)
    small = diagonal * 1e-6, row * 1e-6, v * 1e-3
    torch.testing.assert_close(
        qd.qd_solve(*small, eps=1e-4), qd.qd_solve(*small, eps=1e-4, floor=1e-4), rtol=0, atol=0
    )
    assert not torch.allclose(
        qd.qd_solve(*small, eps=1e-4), qd.qd_solve(*small, eps=1e-4, floor=0.0)
    )


@pytest.mark.parametrize("alpha", [1.0, 0.01, -0.5])
def test_rank_one_update_is_the_paper_s(alpha: float) -> None:
    diagonal, row, v = metric(6)
    expected = reference.qd_rank_one_update(diagonal.tolist(), row.tolist(), v.tolist(), alpha)
    for got, want in zip(qd.qd_rank_one_update(diagonal, row, v, alpha), expected, strict=True):
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-15)


def test_many_blocks_at_once_are_as_good_as_one_by_one() -> None:
    blocks = [metric(4, seed=seed) for seed in range(6)]
    diagonal, row, v = (torch.stack(z).unflatten(0, (2, 3)) for z in zip(*blocks, strict=True))
    together = qd.qd_solve(diagonal, row, v)
    apart = torch.stack([qd.qd_solve(*block) for block in blocks]).unflatten(0, (2, 3))
    torch.testing.assert_close(together, apart, rtol=1e-14, atol=0)
    updated = qd.qd_rank_one_update(diagonal, row, v, 0.1)
    assert updated[0].shape == diagonal.shape
    assert updated[1].shape == row.shape


def test_a_block_that_was_never_seen_gets_no_step() -> None:
    zero = torch.zeros(4, dtype=torch.float64)
    for eps in (0.0, 1e-8):
        assert qd.qd_solve(zero, zero[1:], zero, eps=eps).tolist() == [0.0] * 4


@pytest.mark.parametrize("level", [0.0, 1.0, -3.0])
def test_a_constant_input_gets_no_step_and_spoils_no_other(level: float) -> None:
    diagonal, row, v = metric(3)
    m00 = diagonal[0]
    wide = (
        torch.cat([diagonal, (level**2 * m00).view(1)]),
        torch.cat([row, (level * m00).view(1)]),
        torch.cat([v, (level * v[0]).view(1)]),
    )
    w = qd.qd_solve(*wide, eps=0.0, floor=0.0)
    assert w[-1] == 0
    torch.testing.assert_close(w[:-1], qd.qd_solve(diagonal, row, v, eps=0.0, floor=0.0))


def test_shift_of_the_inputs_moves_only_the_bias() -> None:
    """Inputs a − c: same weights' step, and the bias takes −Σ c w back."""
    diagonal, row, v = metric(5)
    c = torch.linspace(-2, 3, 5, dtype=torch.float64)
    m00, v0 = diagonal[0], v[0]
    moved = torch.cat([m00.view(1), diagonal[1:] - 2 * c * row + c**2 * m00])
    w = qd.qd_solve(diagonal, row, v, eps=0.0, floor=0.0)
    w_moved = qd.qd_solve(
        moved, row - c * m00, torch.cat([v0.view(1), v[1:] - c * v0]), eps=0.0, floor=0.0
    )
    torch.testing.assert_close(w_moved[1:], w[1:], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(w_moved[0] - (c * w_moved[1:]).sum(), w[0], rtol=1e-10, atol=1e-12)
