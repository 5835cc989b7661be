"""The compiled CPU update against the eager oracle in float64."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quasidiag as qd
from quasidiag import kernels, moments, reductions
from quasidiag.auto.orthogonal import ENTIRE, POLES
from quasidiag.cache import cache_folder
from quasidiag.kernels import Averaging, Squares, Wanted, native
from quasidiag.kernels.rule import Rule
from quasidiag.moments import Moments
from quasidiag.root import quasi_diagonal

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")

ROWS, N = 96, 261  # not a multiple of any vector width, and above the size where it pays


def block(seed: int = 0, shifted: bool = True) -> dict[str, Tensor]:
    """Moments of real samples, so that they are consistent, and a gradient."""
    g = torch.Generator().manual_seed(seed)
    a = torch.rand(64, N, generator=g) + 0.5
    a[:, 3] = 0.25  # an input that never varies
    shift = a.mean(0)
    w = torch.rand(64, ROWS, generator=g)
    w[:, 5] = 0.0  # a unit that never had a derivative
    c = a - shift if shifted else a
    return {
        "m00": w.mean(0),
        "m0i": w.T @ c / 64,
        "mii": w.T @ c.square() / 64,
        "v0": torch.randn(ROWS, generator=g),
        "vi": torch.randn(ROWS, N, generator=g),
        "shift": shift,
    }


def moments_(b: dict[str, Tensor]) -> list[Tensor]:
    """As of one layer among several."""
    return [b[key].unsqueeze(0) for key in ("m00", "m0i", "mii")]


def oracle(b: dict[str, Tensor], eps: float, floor: float, shifted: bool) -> tuple[Tensor, Tensor]:
    d = {name: t.double() for name, t in b.items()}
    shift = d.pop("shift")
    return reductions.quasi_diagonal(**d, eps=eps, floor=floor, shift=shift if shifted else None)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(("eps", "floor"), [(1e-4, 1e-4), (1e-4, 0.0), (1e-3, 0.05)])
def test_quasi_diagonal_solve(shifted: bool, eps: float, floor: float) -> None:
    b = block(shifted=shifted)
    w = (torch.full((ROWS,), torch.nan), torch.full((ROWS, N), torch.nan))
    shift = b["shift"] if shifted else None
    five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
    assert native.quasi_diagonal(*five, shift, Rule(eps=eps, floor=floor), w=w)
    for got, want in zip(w, oracle(b, eps, floor, shifted)):
        assert (got - want).norm() < 1e-4 * want.norm()


def test_quasi_diagonal_in_any_default_precision() -> None:
    b, found = block(shifted=False), []
    five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
    for default in (torch.float32, torch.float16):
        w = (torch.empty(ROWS), torch.empty(ROWS, N))
        torch.set_default_dtype(default)
        try:
            assert native.quasi_diagonal(*five, None, Rule(eps=1e-4, floor=1e-4), w=w)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(w)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_quasi_diagonal_step_with_momentum_and_decay() -> None:
    b = block()
    rule = Rule(lr=0.1, decay=0.9, momentum=0.7, eps=1e-3, floor=1e-3, scale=-0.5)
    theta, buffer = (
        [torch.randn(ROWS, dtype=torch.double), torch.randn(ROWS, N, dtype=torch.double)]
        for _ in range(2)
    )
    thetas, buffers = tuple(t.float() for t in theta), tuple(t.float() for t in buffer)
    five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
    assert native.quasi_diagonal(*five, b["shift"], rule, buffers=buffers, thetas=thetas)
    b["v0"], b["vi"] = -0.5 * b["v0"], -0.5 * b["vi"]
    for i, w in enumerate(oracle(b, 1e-3, 1e-3, True)):
        want = 0.7 * buffer[i] + w
        assert (buffers[i] - want).norm() < 1e-4 * want.norm()
        stepped = 0.9 * theta[i] - 0.1 * want
        assert (thetas[i] - stepped).norm() < 1e-4 * stepped.norm()


def test_quasi_diagonal_gives_no_step_where_nothing_varies() -> None:
    b = block()
    w = (torch.empty(ROWS), torch.empty(ROWS, N))
    five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
    assert native.quasi_diagonal(*five, b["shift"], Rule(eps=0.0, floor=0.0), w=w)
    assert (w[1][:, 3] == 0).all()
    assert (w[1][5] == 0).all() and w[0][5] == 0


@pytest.mark.parametrize(("eps", "floor"), [(1e-8, 1e-8), (0.0, 0.0), (1e-3, 0.3)])
def test_diagonal(eps: float, floor: float) -> None:
    m = torch.rand(200, 99)
    m[7] = 0.0
    v, theta, buffer = torch.randn(3, 200, 99).unbind()
    rule = Rule(lr=0.3, decay=0.5, momentum=0.9, eps=eps, floor=floor)
    w = torch.empty_like(m)
    assert native.diagonal([m], [v], rule, w=[w])
    want = reductions.diagonal(m.double(), v.double(), eps=eps, floor=floor)
    assert (w - want).norm() <= 1e-6 * want.norm()
    expected = 0.5 * theta - 0.3 * (0.9 * buffer + w)
    assert native.diagonal([m], [v], rule, buffers=[buffer], thetas=[theta])
    torch.testing.assert_close(theta, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_square_flushes_adds_and_lets_nan_through() -> None:
    delta = torch.randn(64, 512)
    delta[0, 0], delta[0, 1], delta[0, 2] = 1e-18, 1e-21, torch.nan
    want = moments.square(3.0 * delta, torch.float32)
    got = native.square(delta, 3.0)
    assert got is not None
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[0, 0] == got[0, 1] == 0 and got[0, 2].isnan()
    twice = native.square(delta, 3.0, onto=got)
    assert twice is got
    torch.testing.assert_close(twice, 2 * want, equal_nan=True)


@pytest.mark.parametrize("shifted", [True, False])
def test_centre(shifted: bool) -> None:
    a, shift = torch.randn(70, 301), torch.randn(301)
    got = native.centre(a, shift if shifted else None)
    assert got is not None
    want = a - shift if shifted else a
    assert torch.equal(got[0], want)
    assert torch.equal(got[1], want.square())


@pytest.mark.parametrize("kept", ["all", "no shift", "no row", "no bias"])
@pytest.mark.parametrize(
    ("rows", "n", "units"), [(1, 1500, 3), (37, 261, 96), (300, 17, 301), (700, 2100, 13)]
)
def test_products(rows: int, n: int, units: int, kept: str) -> None:
    g = torch.Generator().manual_seed(0)
    a, w = torch.rand(rows, n, generator=g), torch.rand(rows, units, generator=g)
    shift = torch.rand(n, generator=g) if kept in ("all", "no row") else None
    into = Moments(
        None if kept == "no bias" else torch.rand(units, generator=g),
        None if kept in ("no row", "no bias") else torch.rand(units, n, generator=g),
        torch.rand(units, n, generator=g),
    )
    before = [None if m is None else m.double() for m in into]
    want = moments.linear(a.double() - (0.0 if shift is None else shift.double()), w.double())
    assert products_(into, a, w, shift, 0.7, 0.3)
    for old, got, new in zip(before, into, want, strict=True):
        if old is not None and got is not None and new is not None:
            exact = 0.7 * old + 0.3 * new
            assert (got - exact).norm() < 1e-6 * exact.norm()


def products_(into: Moments, *arguments: Any) -> bool:
    """Also where torch's own products would be taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "multiplies", lambda: True)
        return native.products_(into, *arguments)


def test_products_let_nan_through_and_flush() -> None:
    a, w = torch.rand(8, 600), torch.rand(8, 12)
    a[3, 5], w[2, 7] = torch.nan, 1e-40
    into = Moments(torch.zeros(12), torch.zeros(12, 600), torch.zeros(12, 600))
    assert products_(into, a, w, None, 1.0, 1.0)
    assert into.mii is not None and into.mii[:, 5].isnan().all()
    assert into.mii.isnan().sum() == 12


@pytest.mark.parametrize(("rows", "n", "units"), [(37, 261, 96), (700, 400, 13)])
def test_products_square_what_they_are_given(rows: int, n: int, units: int) -> None:
    g = torch.Generator().manual_seed(0)
    a, delta = torch.rand(rows, n, generator=g), torch.randn(rows, units, generator=g)
    delta[0, 0] = 1e-17  # squared and scaled it is still as good as nothing
    into = Moments(torch.zeros(units), torch.zeros(units, n), torch.zeros(units, n))
    want = moments.linear(a.double(), (3.0 * delta.double()).square())
    assert products_(into, a, Squares(delta, 3.0), None, 1.0, 0.5)
    for got, exact in zip(into, want, strict=True):
        assert got is not None and exact is not None
        assert (got - 0.5 * exact).norm() < 1e-6 * exact.norm()
    single = Moments(torch.zeros(units), torch.zeros(units, n), torch.zeros(units, n))
    assert products_(single, a[:1], Squares(delta[:1], 3.0), None, 1.0, 1.0)
    assert single.m00 is not None and single.m00[0] == 0 and (single.m00[1:] > 0).all()


@pytest.mark.parametrize(("rows", "n", "units"), [(37, 261, 96), (700, 400, 13), (600, 1100, 5)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("quasi", [True, False])
def test_products_and_the_step_after_them(
    rows: int, n: int, units: int, threads: int, quasi: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    a, delta = torch.rand(rows, n, generator=g), torch.randn(rows, units, generator=g)
    shift = torch.rand(n, generator=g) if quasi else None
    row = torch.rand(units, n, generator=g) if quasi else None
    into = Moments(1 + torch.rand(units, generator=g), row, 2 + torch.rand(units, n, generator=g))
    gradients, thetas = (
        [torch.randn(units, generator=g), torch.randn(units, n, generator=g)] for _ in range(2)
    )
    rule = Rule(lr=0.1, decay=0.9, eps=1e-3, floor=0.4, scale=-0.5)
    centred = a.double() - (0.0 if shift is None else shift.double())
    new = moments.linear(centred, (3.0 * delta.double()).square())
    exact = [
        0.7 * old.double() + 0.01 * added
        for old, added in zip(into, new)
        if old is not None and added is not None
    ]
    v = [-0.5 * gradient.double() for gradient in gradients]
    damping = {"eps": 1e-3, "floor": 0.4}
    if quasi and shift is not None:
        w = reductions.quasi_diagonal(*exact, *v, shift=shift.double(), **damping)
    else:
        w = tuple(reductions.diagonal(m, vi, **damping) for m, vi in zip(exact, v))
    want = [0.9 * theta.double() - 0.1 * wi for theta, wi in zip(thetas, w)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert products_(into, a, Squares(delta, 3.0), shift, 0.7, 0.01, gradients, rule, thetas)
    finally:
        torch.set_num_threads(before)
    for got, m in zip((m for m in into if m is not None), exact, strict=True):
        assert (got - m).norm() < 1e-6 * m.norm()
    for theta, stepped in zip(thetas, want):
        assert (theta - stepped).norm() < 1e-5 * stepped.norm()


def test_squares_stand_for_their_numbers() -> None:
    delta = torch.randn(50, 100)
    squares = Squares(delta, 3.0)
    assert torch.equal(squares.formed(), moments.square(3.0 * delta, torch.float32))
    assert torch.equal(squares.to(torch.float64), squares.formed().double())
    assert squares.sum() == squares.formed().sum()
    assert torch.equal(squares.flatten(0, -1).delta, delta.flatten())
    onto = kernels.square(delta, 2.0, onto=squares)
    torch.testing.assert_close(onto, 13 * delta.square())
    assert isinstance(kernels.squares(delta, 0.0), Tensor)  # a loss of weight zero


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_no_bit(threads: int) -> None:
    """A unit's numbers are summed in the same order, whoever does it."""

    def everything() -> list[Tensor]:
        b = block()
        w = (torch.empty(ROWS), torch.empty(ROWS, N))
        five = [b[name] for name in ("m00", "m0i", "mii", "v0", "vi")]
        assert native.quasi_diagonal(*five, b["shift"], Rule(eps=1e-4, floor=1e-4), w=w)
        squared, centred = native.square(b["vi"]), native.centre(b["vi"], b["shift"])
        assert squared is not None and centred is not None
        found = [*w, squared, *centred]
        for units in (ROWS, 20):  # more and fewer than make a share for each thread
            into = [torch.rand(units), torch.rand(units, N), torch.rand(units, N)]
            a, weights = torch.rand(300, N), torch.rand(300, units)
            assert products_(Moments(*into), a, weights, b["shift"], 0.5, 0.5)
            found += into
        if native.vectors():
            v, root = (
                [b["v0"].unsqueeze(0), b["vi"].unsqueeze(0)],
                quasi_diagonal(*moments_(b), None),
            )
            wide, narrow = Wanted(v, root, 3, 1e-3, 1.0), Wanted(v, root, 1, 0.0, 1.0)
            for wanted in ([wide], [narrow], [narrow, wide, wide, narrow]):  # together, or apart
                averages = [[x.clone() for x in v] for _ in wanted]
                moved = [x._replace(v=a) for x, a in zip(wanted, averages)]
                directions = native.Directions(moved, ENTIRE, POLES)
                assert directions.average([Averaging(v, 1.0, 1.0)] * len(wanted), 0.5)
                for step in (native.Directions(wanted, ENTIRE, POLES).find() or []) + (
                    directions.find() or []
                ):
                    found += [*step.steps, torch.tensor(step.slope)]
                found += [x for pair in averages for x in pair]
                assert len(found) > 4 * len(wanted)
        return found

    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            found.append(everything())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("bounds", [None, (0.1, 0.2, 0.3)])
@pytest.mark.parametrize("shifted", [True, False])
def test_root(shifted: bool, bounds: tuple[float, float, float] | None) -> None:
    layers = [block(seed, shifted) for seed in range(2)]
    m00, m0i, mii, shift = (
        torch.stack([b[key] for b in layers]) for key in ("m00", "m0i", "mii", "shift")
    )
    where = shift.unsqueeze(1) if shifted else None
    got = native.root(m00, m0i, mii, where, bounds)
    exact = None if where is None else where.double()
    want = quasi_diagonal(m00.double(), m0i.double(), mii.double(), exact, bounds)
    assert got is not None
    for found, expected in zip(got, want, strict=True):
        assert expected is not None
        part = slice(4, None) if expected.dim() == 3 else slice(None)  # input 3 varies by rounding
        close = {"rtol": 2e-3, "atol": 1e-5}
        torch.testing.assert_close(found.double()[..., part], expected[..., part], **close)
    if bounds is None:
        assert not got[2][:, 5].any() and (not shifted or not got[2][..., 3].any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_precision_does_not_matter(dtype: torch.dtype) -> None:
    found = []
    for default in (torch.float32, dtype):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)
        )
        x, t, loss = torch.randn(64, 20), torch.randint(3, (64,)), qd.Categorical()
        optimizer = qd.Riemannian(model, loss)
        try:
            torch.set_default_dtype(default)
            for _ in range(6):
                optimizer.zero_grad()
                loss(model(x), t).backward()
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_finite(bad: float | None) -> None:
    tensors = [torch.full((70, 80), 3e38), torch.zeros(5)]
    if bad is not None:
        tensors[0][33, 7] = bad
    assert native.finite(tensors) is (bad is None)
    tensors[0][33, 7], tensors[1][4] = 0.0, torch.nan
    assert native.finite(tensors) is False
    assert native.finite(tensors[1:]) is False
    assert native.finite([*tensors, object()]) is None
    assert native.finite([Squares(torch.full((70, 80), 1e18))]) is True
    assert native.finite([Squares(torch.full((70, 80), 1e18), 1e3)]) is False


def test_threads_are_torchs_own() -> None:
    """Two OpenMP libraries in a process would have two sets of threads, which fight for the cores."""
    count = """
from quasidiag.kernels import native
loaded = lambda: {x.split()[-1] for x in open("/proc/self/maps") if "libgomp" in x}
before = loaded()
assert native.library() is not None
print(len(loaded() - before) if before else 0)
"""
    found = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    assert found.stdout.strip() == "0", found.stderr


def _in_a_child(queue: Any) -> None:
    queue.put(native.finite([torch.ones(100, 100)]))


def test_a_forked_process_can_go_on() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert native.finite(
        [torch.ones(100, 100)]
    )  # starts the threads that a fork does not take along
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_a_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) is True
    finally:
        child.kill()
        child.join()
        torch.set_num_threads(before)


def test_declines_what_it_cannot_do() -> None:
    big = torch.rand(200, 200)
    assert native.square(big.double()) is None
    assert native.square(big.T) is None
    assert native.square(big[:2]) is None
    assert native.square(big.to(torch.bfloat16)) is None
    assert native.centre(big.expand(2, 200, 200), None) is None


def test_an_assembler_older_than_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that does not know the instructions for tiles."""
    old = "gcc -Wa,-march=+noamx_tile"
    code = tmp_path / "empty.c"
    code.touch()
    known = subprocess.run([*old.split(), "-c", code, "-o", tmp_path / "o"], capture_output=True)
    if known.returncode:
        pytest.skip("an assembler that cannot leave instructions out")
    monkeypatch.setenv("QUASIDIAG_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", old)
    compiled = native.library.__wrapped__()
    assert compiled is not None and not compiled.qd_multiplies(native.Factors.TILES)


def test_a_cache_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QUASIDIAG_CACHE", "~/kept")
    assert native.library.__wrapped__() is not None
    assert [*(tmp_path / "kept").glob("native-*.so")]


def test_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setenv("QUASIDIAG_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("QUASIDIAG_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert native.library.__wrapped__() is None
