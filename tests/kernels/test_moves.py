"""The kernel that moves parameters on a GPU against the plain code: there, or on a CPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quasidiag.kernels import gpu, moves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not gpu.interpreted(), reason="neither a GPU nor the interpreter"
)
SIZES = [(3,), (90, 61), (1, 1), (2, moves.BLOCK)]


def some(seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=g).to(DEVICE) for size in SIZES]


@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_move(settles: bool, aligned: bool) -> None:
    """Of parameters of which some have nothing that follows them."""
    thetas, ws, aparts, ways = (some(seed) for seed in range(4))
    if not aligned:
        ws[0] = torch.cat([ws[0], ws[0]])[3:]
    follow: list[list[Tensor | None]] = [[*aparts], [*ways]]
    follow[0][0] = follow[1][1] = follow[0][3] = follow[1][3] = None
    before = [[x.double() for x in of] for of in (thetas, ws, aparts, ways)]
    norms = gpu.move_(thetas, ws, -0.3, follow[0], 0.8, follow[1], settles)
    assert norms is not None
    for k, (theta, w, e, way) in enumerate(zip(*before)):
        moved = -0.3 * w
        offset = 0.8 * (e + moved) if follow[0][k] is not None else e
        rest = offset if settles and follow[0][k] is not None else 0.0
        want = [theta + moved - rest, moved, offset, way + moved]
        want[3] = want[3] if follow[1][k] is not None else way
        for got, exact in zip((thetas[k], ws[k], aparts[k], ways[k]), want):
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
        if settles:
            assert torch.equal(norms[k], torch._foreach_norm([thetas[k]])[0])


def test_no_kernel_for_other_shapes_and_dtypes() -> None:
    thetas, ws = some(0), some(1)
    none = [None] * len(ws)
    assert gpu.move_(thetas, [w.double() for w in ws], 1.0, none, 0.0, none, False) is None
    assert gpu.move_(thetas, [*ws[:3], ws[3].T], 1.0, none, 0.0, none, False) is None
    assert gpu.move_(thetas, [*ws[:3], ws[3][:1]], 1.0, none, 0.0, none, False) is None


def test_norms_do_not_depend_on_others() -> None:
    """Of another dtype or layout, with which torch would compute all of them in another way."""
    xs = [*some(0), torch.randn(700, 900).to(DEVICE)]
    others = [xs[1].double(), xs[1].T, torch.ones(2)]
    both = gpu.norms([*others, *xs])
    assert all(map(torch.equal, both[len(others) :], gpu.norms(xs)))
    for norm, x in zip(both, [*others, *xs]):
        torch.testing.assert_close(norm, torch.linalg.vector_norm(x))
