"""Directions and lengths in the coordinates of the metric, compiled, against the plain code in float64."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nets import averages
from quasidiag.auto import orthogonal
from quasidiag.auto.orthogonal import ENTIRE, POLES
from quasidiag.auto.proportions import HALF, share
from quasidiag.auto.proposal import averaged_
from quasidiag.kernels import Averaging, Wanted, native
from quasidiag.kernels.native import Factors
from quasidiag.root import Root

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")

vectors = pytest.mark.skipif(
    not native.vectors(), reason="directions are compiled for processors with AVX2 or AVX-512"
)


#: In bfloat16, numbers next to a tie are rounded to either side.
CLOSE = {False: 2e-4, True: 2e-2}


def able(factors: Factors) -> bool:
    """Whether this processor can multiply them."""
    compiled = native.library()
    return compiled is not None and bool(compiled.qd_multiplies(factors))


@pytest.fixture(autouse=True, params=Factors, ids=lambda factors: factors.name.lower())
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether products are in bfloat16."""
    if not able(request.param):
        pytest.skip("a processor that does not multiply so")
    monkeypatch.setattr(native, "factors", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("half", [Factors.FLOATS], indirect=True)
def test_what_a_processor_multiplies_fastest_is_told_by_what_linux_says_of_it(half: bool) -> None:
    """A compiler that is old, or not GNU's, leaves bfloat16 out."""
    told, compiled = Path("/proc/cpuinfo").read_text(), native.library()
    assert compiled is not None
    fastest = Factors(compiled.qd_fastest())
    assert able(fastest)
    if fastest is Factors.TILES:
        assert "amx_bf16" in told
    elif not (all(word in told for word in ("AuthenticAMD", "avx512_bf16")) and native.vectors()):
        assert fastest is Factors.FLOATS
    elif torch.backends.cpu.get_cpu_capability() == "AVX512" and shutil.which("gcc"):
        assert fastest is Factors.PAIRS


@pytest.mark.parametrize("half", [Factors.TILES], indirect=True)
def test_tiles_are_found_where_nobody_waits_for_children(half: bool) -> None:
    ask = "from quasidiag.kernels import native; print(native.library().qd_multiplies(2))"
    ignore = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    found = subprocess.run([sys.executable, "-c", ignore + ask], capture_output=True, text=True)
    assert found.stdout.split() == ["1"], found.stderr


def a_root(kept: str, layers: int, units: int, n: int) -> Root:
    g = torch.Generator().manual_seed(1)
    bias, scale = torch.rand(layers, units, generator=g), torch.rand(layers, units, n, generator=g)
    mean = torch.randn(layers, units, n, generator=g)
    if n > 3:
        scale[0, :, 3] = 0.0  # an input that has never varied
    return Root(None if kept == "no bias" else bias, mean if kept == "all" else None, scale)


def doubled(root: Root) -> Root:
    return Root(*(None if t is None else t.double() for t in root))  # type: ignore[arg-type]


def test_lengths() -> None:
    """Of layers of all kinds at once, and which part of their units take part."""
    given = []
    for kept, units, n in [("all", 96, 261), ("no row", 7, 5), ("no bias", 300, 1), ("all", 1, 4)]:
        w = [torch.randn(units), torch.randn(units, n)][-1 if kept == "no bias" else 0 :]
        w[-1][0] *= 0.1  # one that is much shorter than usual
        given.append((w, a_root(kept, 1, units, n).of(0)))
    zeros = [torch.zeros(5), torch.zeros(5, 6)], a_root("all", 1, 5, 6).of(0)
    found = native.lengths([*given, zeros], HALF)
    assert found is not None
    for (w, root), got in zip(given, found):
        want = doubled(root).lengths([t.double() for t in w])
        assert got.total == pytest.approx(float(want.sum()), rel=1e-4)
        assert got.share == pytest.approx(float(share(want)), rel=1e-4)
    assert found[-1] == (0.0, 1.0)


#: Smaller matrices are multiplied in float32 (``orthogonal.h``).
FEW = 64
SHAPES = [
    (1, 64, 80),
    (1, 71, 64),
    (1, 8, 8),
    (2, 30, 50),
    (2, 1, 70),
    (1, 70, 1),
    (3, 41, 9),
    (1, 257, 300),
    (1, 300, 257),
]


def gradient(shape: tuple[int, int, int], kept: str = "all") -> list[Tensor]:
    v = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    v[..., 0] *= 30  # a strong direction, as gradients have
    v[0, -1] = 0.0  # a unit without a gradient
    return [v] if kept == "no bias" else [v.mean(-1), v]


def direction(v: Any, root: Any) -> list[Tensor] | None:
    """Of one kind of layers, as they are."""
    (found,) = orthogonal.at_once([Wanted(v, root, 1, 0.0, 1.0)])
    return found


def at_once(root: Root, v: list[Tensor]) -> list[Tensor] | None:
    (found,) = orthogonal.at_once([orthogonal.wanted(root, v)])
    return found


def exactly(v: list[Tensor], root: Root) -> list[Tensor]:
    """By the plain code, in float64; rounded where the compiled code rounds."""
    double = doubled(root)
    u = double.gradient([t.double() for t in v])
    matrices = orthogonal._apart(u)
    half = bool(native.factors()) and min(matrices.shape[1:]) >= FEW
    return double.step(orthogonal._together(orthogonal.by_poles(matrices, half), u.shape))


def exact(v: Tensor) -> Tensor:
    """The orthogonal factor in float64, not rounded to bfloat16 anywhere."""
    return orthogonal.by_poles(v.double())


@vectors
@pytest.mark.parametrize("kept", ["all", "no row", "no bias"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 801, 784)], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
def test_direction(shape: tuple[int, int, int], kept: str, size: float, half: bool) -> None:
    v, root = gradient(shape, kept), a_root(kept, *shape)
    got = at_once(root, [size * x for x in v])
    assert got is not None
    for found, want in zip(got, exactly(v, root), strict=True):
        assert (found - want).norm() <= CLOSE[half] * want.norm()


@vectors
@pytest.mark.parametrize("rank", [1, 5, 64, 200])
def test_directions_are_as_exact_as_the_plain_ones(rank: int, half: bool) -> None:
    """A minibatch smaller than a layer: elsewhere its gradient has nothing, and what multiplies it is large."""
    g = torch.Generator().manual_seed(0)
    v = [torch.randn(1, 200, rank, generator=g) @ torch.randn(1, rank, 300, generator=g)]
    got, want = at_once(Root(None, None, torch.ones(1, 200, 300)), v), exact(v[0])
    plain = orthogonal.by_poles(v[0], half)
    assert got is not None
    ours, theirs = (float((x - want).norm() / want.norm()) for x in (got[0], plain))
    assert ours < 1.2 * theirs if half else ours < 5 * theirs < 1e-3


@vectors
@pytest.mark.parametrize("rows", [30, 70])
def test_gradients_near_the_largest_float(rows: int, half: bool) -> None:
    """The inverse of their largest entry is denormal, and denormals are flushed here."""
    v = gradient((1, rows, 90), "no bias")[0]
    v *= 3e38 / v.abs().max()
    got, want = at_once(Root(None, None, torch.ones_like(v)), [v]), exact(v / 3e38)
    assert got is not None
    assert (got[0] - want).norm() < (0.1 if half else 1e-2) * want.norm()


@vectors
@pytest.mark.parametrize("weakest", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_bfloat16_is_exact_enough_for_a_direction(weakest: float, half: bool) -> None:
    """Of gradients with weaker and weaker directions, as networks have."""
    left, _, right = torch.linalg.svd(gradient((1, 160, 785), "no bias")[0], full_matrices=False)
    v = [(left * torch.logspace(0, math.log10(weakest), 160)) @ right]
    got, want = at_once(Root(None, None, torch.ones_like(v[0])), v), exact(v[0])
    assert got is not None
    error = (got[0] - want).norm() / want.norm()
    assert (0.001 if half else 0.0) < error < (0.1 if half else 1e-3)


@vectors
@pytest.mark.parametrize("columns", [2_000, 4_000, 16_000, 100_000])
@pytest.mark.parametrize("rows", [16, 32, 100])
@pytest.mark.parametrize("kinds", [1, 5])
def test_many_columns_that_are_alike(columns: int, rows: int, kinds: int, half: bool) -> None:
    """As in flat regions of images: rounding then adds up, and the Gram matrix may not be positive any more."""
    few = torch.randn(1, rows, kinds, generator=torch.Generator().manual_seed(0)).sign()
    v = [few.repeat(1, 1, columns // kinds)]
    got, want = at_once(Root(None, None, torch.ones_like(v[0])), v), exact(v[0])
    least = (orthogonal.by_poles(v[0].double(), half and rows >= FEW) - want).norm()
    assert got is not None
    assert (got[0] - want).norm() < 0.01 * want.norm() + 1.2 * least


@vectors
@pytest.mark.parametrize("rows", [30, 80])
def test_inverses_that_rounding_has_spoilt_count_for_nothing(rows: int) -> None:
    v = gradient((2, rows, 90), "no bias")
    v[0][1, 0] = torch.nan  # which stays where it is
    wanted = [Wanted(v, Root(None, None, torch.ones_like(v[0])), 1, 0.0, 1.0)]
    found = native.Directions(wanted, ENTIRE, [(POLES[0][0], -0.1), POLES[1]]).find()
    other = native.Directions(wanted, ENTIRE, [POLES[1]]).find()
    assert found is not None and other is not None
    (got,), (want,) = found[0].steps, other[0].steps
    torch.testing.assert_close(got[0], want[0])
    assert got[1].isnan().any()


@vectors
def test_directions_of_nothing_or_next_to_nothing_are_declined() -> None:
    for shape in [(1, 0, 5), (1, 5, 0), (1, 2, native.LONG + 1)]:
        root = Root(None, None, torch.ones(shape))
        assert direction([torch.ones(shape)], root) is None


@vectors
@pytest.mark.parametrize("shape", [(31, 33, 4100), (31, 33, 410), (31, 70, 75)], ids=str)
def test_directions_of_more_than_fits_at_once_and_of_zeros(shape: tuple[int, int, int]) -> None:
    """Of matrices that go one by one, and of some that go together."""
    v = gradient(shape)
    v[0][7], v[1][7] = 0.0, 0.0
    root = a_root("all", *shape)
    got = direction(v, root)
    assert got is not None and not got[1][7].any()
    for i in range(31):
        alone = [x[i : i + 1] for x in v], [None if x is None else x[i : i + 1] for x in root]
        one = direction(*alone)
        assert one is not None
        assert all(torch.equal(x[i], y[0]) for x, y in zip(got, one, strict=True))


@vectors
def test_layers_of_all_kinds_go_together() -> None:
    """One that is declined between them; as each alone, to the bit."""
    shapes = [(1, 300, 257), (2, 30, 50), (1, 2, native.LONG + 1), (1, 257, 300), (3, 41, 9)]
    of = [(gradient(shape), a_root("all", *shape)) for shape in shapes]
    wanted = [orthogonal.wanted(root, v) for v, root in of]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = orthogonal.at_once(wanted)
    finally:
        torch.set_num_threads(before)
    for (v, root), got in zip(of, found, strict=True):
        alone = at_once(root, v)
        assert (got is None) == (alone is None) == (v[-1].shape[-1] > native.LONG)
        assert all(torch.equal(x, y) for x, y in zip(got or [], alone or [], strict=True))


@vectors
@pytest.mark.parametrize("parts", ["all", "no row", "no bias"])
@pytest.mark.parametrize("shape", [(8, 8), (41, 9), (1, 70), (400, 330)], ids=str)
def test_gradients_are_averaged_on_the_way(shape: tuple[int, int], parts: str, half: bool) -> None:
    """As by the plain code, one after the other; and the slope along what comes of it."""
    root = Root(*(None if t is None else t[0] for t in a_root(parts, 1, *shape)))
    states: list[dict[str, Any]] = [{} for _ in range(2 - (parts == "no bias"))]
    before = [x[0] for x in gradient((1, *shape), parts)]
    averages(states, before, 0.2)
    kept = [state["average"].clone() for state in states]
    g = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) for x in before]
    directions = orthogonal.directions([orthogonal.wanted(root, kept)])
    assert directions.average([Averaging(g, 1.5, 3.0)], 0.2)
    every = directions.find()
    v = [1.5 * x for x in averaged_(states, [x.double() for x in g], 0.2, [1.0] * len(g))]
    steps = exactly([x.unsqueeze(0) for x in v], Root(*(x if x is None else x[None] for x in root)))
    assert every is not None
    (found,) = every
    for x, state in zip(kept, states, strict=True):
        torch.testing.assert_close(x, state["average"])
    for x, y in zip(found.steps, steps, strict=True):
        assert (x - 3 * y[0]).norm() <= CLOSE[half] * 3 * y.norm()
    slope = sum(float((x.double() * y).sum()) for x, y in zip(found.steps, g))
    assert found.slope == pytest.approx(slope, rel=1e-4, abs=1e-5)


@vectors
def test_gradients_of_another_shape_are_declined() -> None:
    root = a_root("no bias", 1, 8, 9)
    directions = orthogonal.directions([orthogonal.wanted(root, [torch.zeros(1, 8, 9)])])
    for other in (torch.zeros(1, 8, 8), torch.zeros(1, 8, 9).double()):
        assert not directions.average([Averaging([other], 1.0, 1.0)], 0.5)
