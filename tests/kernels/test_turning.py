"""The kernels of a direction on a GPU against ``Root`` in float64: on a GPU, or on a CPU through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quasidiag.auto import orthogonal
from quasidiag.kernels import gpu, turning
from quasidiag.kernels.wanted import Place, Wanted
from quasidiag.root import Root

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not gpu.interpreted(), reason="neither a GPU nor the interpreter"
)


def layers(
    shape: tuple[int, int, int], groups: int = 1, bias: bool = True, mean: bool = True
) -> Wanted:
    """Layers with gradients and roots at random; a unit was never active, and an input never varied."""
    g = torch.Generator().manual_seed(sum(shape))
    number, units, _ = shape
    inverse = torch.rand(number, units, generator=g) + 0.5
    inverse[:, 0] = 0.0
    scale = torch.rand(*shape, generator=g) + 0.5
    scale[..., -1] = 0.0
    centre = torch.randn(*shape, generator=g)
    v = [torch.randn(number, units, generator=g), torch.randn(*shape, generator=g)]
    root = Root(inverse if bias else None, centre if bias and mean else None, scale)
    wanted = Wanted(
        v if bias else v[1:], root, groups, orthogonal.FADED if groups > 1 else 0.0, 0.7
    )
    return wanted._replace(v=moved(wanted.v), root=moved(wanted.root))


def moved(tensors: object, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    return [None if t is None else t.to(DEVICE, dtype) for t in tensors]  # type: ignore[attr-defined]


def oracle(wanted: Wanted) -> Root:
    return Root(*moved(wanted.root, torch.float64))


def units_in(place: Place, wanted: Wanted) -> Tensor:
    """What lies in the place: the coordinates of units, ``[layers, units, coordinates]``."""
    number, units, n = wanted.v[-1].shape
    rows, columns = -(-units // wanted.groups), n + len(wanted.v) - 1
    room = place.room.mT if place.turned else place.room
    room = room[place.first :][: number * wanted.groups, :rows, :columns]
    return room.reshape(number, -1, columns)[:, :units]


def place_for(wanted: Wanted, turned: bool, fill: float = 0.0) -> Place:
    """A place behind one matrix that is another's, with room to spare."""
    number, units, n = wanted.v[-1].shape
    sides = -(-units // wanted.groups) + 3, n + 6
    room = torch.full((1 + number * wanted.groups, *sides), fill, device=DEVICE)
    room = room.mT.contiguous() if turned else room
    return Place(room.bfloat16(), 1, turned)


CASES = [
    ((1, 5, 2100), 1, True, True),  # more than one block of a row, and no multiple of it
    ((2, 7, 33), 3, True, True),  # groups of three units, the last of one
    ((3, 4, 1), 1, True, False),
    ((1, 6, 40), 2, False, False),
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("shape", "groups", "bias", "mean"), CASES)
def test_into_coordinates(
    shape: tuple[int, int, int], groups: int, bias: bool, mean: bool, turned: bool
) -> None:
    wanted = layers(shape, groups, bias, mean)
    place = place_for(wanted, turned)
    turning.turn_(wanted, place)
    want = oracle(wanted).gradient(moved(wanted.v, torch.float64))
    found = units_in(place, wanted).double()
    # A GPU rounds to bfloat16, and the interpreter cuts off.
    rtol = 2**-8 if DEVICE == "cuda" else 2**-7
    torch.testing.assert_close(found, want, rtol=rtol, atol=1e-5)
    assert float(place.room.double().square().sum()) == pytest.approx(float(found.square().sum()))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("shape", "groups", "bias", "mean"), CASES)
def test_back_from_coordinates(
    shape: tuple[int, int, int], groups: int, bias: bool, mean: bool, turned: bool
) -> None:
    wanted = layers(shape, groups, bias, mean)
    place = place_for(wanted, turned, fill=torch.nan)
    g = torch.Generator().manual_seed(1)
    place.room.copy_(torch.randn(place.room.shape, generator=g))
    u = units_in(place, wanted).double()
    if groups > 1:
        u = u / u.norm(dim=-1, keepdim=True).clamp_min(wanted.shortest)
    found = turning.turn_back(wanted, place)
    assert [w.shape for w in found] == [v.shape for v in wanted.v]
    for got, want in zip(found, oracle(wanted).step(wanted.by * u), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_a_unit_of_zeros_stays_one() -> None:
    wanted = layers((1, 6, 40), 2)
    found = turning.turn_back(wanted, place_for(wanted, False))
    assert not any(w.any() for w in found)


@pytest.mark.parametrize("batch", [True, False])
def test_steps_of_layers_of_many_shapes(batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide, tall and in groups, some of which share a room: as by the eager code, but for bfloat16."""
    monkeypatch.setitem(orthogonal.SMALL, "cpu", 2**14)
    monkeypatch.setattr(orthogonal, "WIDE", 16)
    monkeypatch.setattr(orthogonal, "GROUP", 9)
    orthogonal._rooms.cache_clear()
    shapes = [(2, 10, 30), (1, 30, 10), (1, 12, 28), (1, 20, 60), (1, 3, 200), (1, 150, 8)]
    wanted = [
        orthogonal.wanted(Root(*of.root), of.v)  # type: ignore[arg-type]
        for of in (layers(shape) for shape in shapes)
    ]
    assert {of.groups for of in wanted} == {1, 3}
    rooms = orthogonal._rooms(tuple(map(orthogonal._kind, wanted)), batch)
    assert any(any(room.turned) for room in rooms) is batch
    found = orthogonal.on_device(wanted, batch)
    orthogonal._rooms.cache_clear()
    for steps, of in zip(found, wanted, strict=True):
        root = oracle(of)
        u = root.gradient(moved(of.v, torch.float64))
        want = root.step(orthogonal.factors([u])[0])
        difference = sum(float((x - y).square().sum()) for x, y in zip(steps, want, strict=True))
        size = sum(float(y.square().sum()) for y in want)
        assert difference < 0.15**2 * size  # singular values come within 9 % of one
