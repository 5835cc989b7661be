"""Directions of equal strength: the polar factor, in coordinates that do not depend on the encoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, linear_layers, mlp
from quasidiag.auto import descent, orthogonal
from quasidiag.auto.orthogonal import (
    ENTIRE,
    GROUP,
    POLES,
    QUINTICS,
    WIDE,
    Kind,
    _rooms,
    by_poles,
    factors,
    newton_schulz,
    of_length,
)
from quasidiag.auto.proposal import FEWEST, reach

Polar = Callable[[Tensor], Tensor]
SHAPES = [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)]


def matrix(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def factor(u: Tensor) -> Tensor:
    """Of one matrix."""
    return orthogonal.factors([u.unsqueeze(0)])[0].squeeze(0)


@pytest.mark.parametrize("shape", [*SHAPES, (40, 90)])
@pytest.mark.parametrize(("polar", "error"), [(newton_schulz, 0.09), (by_poles, 0.12)])
def test_singular_values_come_near_one_and_directions_stay(
    shape: tuple[int, int], polar: Polar, error: float
) -> None:
    x = matrix(*shape)
    p, _, q = torch.linalg.svd(x, full_matrices=False)
    found = polar(x.unsqueeze(0)).squeeze(0)
    inside = p.T @ found @ q.T  # diagonal: the singular directions are those of x
    torch.testing.assert_close(p @ inside @ q, found)
    torch.testing.assert_close(inside, torch.diag(inside.diagonal()))
    assert (inside.diagonal() - 1).abs().max() < error


@pytest.mark.parametrize("polar", [newton_schulz, by_poles])
def test_matrices_of_any_size_and_of_zeros(polar: Polar) -> None:
    x = torch.stack([matrix(4, 9), 1e-9 * matrix(4, 9), torch.zeros(4, 9)])
    found = polar(x)
    torch.testing.assert_close(found[1], found[0])
    assert not found[2].any()
    single = polar(1e-30 * x.float())  # squares of these are none
    torch.testing.assert_close(single[0].double(), found[0], rtol=0, atol=1e-4)


def test_singular_values_of_rounding_do_no_harm() -> None:
    """In float32 the Gram matrix has eigenvalues slightly below zero."""
    x = (matrix(60, 3) @ matrix(3, 80)).float().unsqueeze(0)
    found = torch.linalg.svdvals(by_poles(x))[0]
    assert found[:3].min() > 0.88 and found.max() < 1.12 and found[3:].max() < 1e-2


@pytest.mark.parametrize("columns", [4_000, 60_000])
@pytest.mark.parametrize("kinds", [1, 5])
def test_many_columns_that_are_alike(columns: int, kinds: int) -> None:
    """Rounding then adds up, and may leave a Gram matrix with eigenvalues well below zero."""
    few = matrix(8, kinds).sign().float()
    x = few.repeat(1, columns // kinds).unsqueeze(0)
    found = torch.linalg.svdvals(by_poles(x))[0]
    rank = int(torch.linalg.matrix_rank(few))
    assert found[:rank].min() > 0.5 and found.max() < 1.12 and found[rank:].max() < 1e-2


def test_a_matrix_that_is_not_finite_spoils_no_other() -> None:
    x = torch.stack([matrix(4, 9), matrix(4, 9)])
    x[0, 1, 2] = math.nan
    found = by_poles(x)
    torch.testing.assert_close(found[1], by_poles(x[1:])[0])
    assert not found[0].isfinite().all()


def test_inverses_that_rounding_has_spoilt_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shift that is too small for it leaves a matrix that is not positive; here, by far."""
    x = matrix(1, 20, 30)
    monkeypatch.setattr(orthogonal, "POLES", [POLES[1]])
    expected = by_poles(x)
    monkeypatch.setattr(orthogonal, "POLES", [(POLES[0][0], -0.1), POLES[1]])
    torch.testing.assert_close(by_poles(x), expected)


@pytest.mark.parametrize("shape", [(256, 256), (128, 400), (60, 50), (64, 64)])
def test_iterations_in_bfloat16_keep_to_their_intervals(shape: tuple[int, int]) -> None:
    """A value that rounding has brought beyond one would grow from iteration to iteration."""
    for x in (matrix(*shape), matrix(*shape).sign()):
        found = torch.linalg.svdvals(newton_schulz(x.bfloat16().unsqueeze(0)).float())
        assert found.max() < 1.1 and found.median() > 0.9


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.float32, "by_poles"),
        ("meta", torch.float32, "newton_schulz"),
        ("meta", torch.float64, "by_poles"),
    ],
)
def test_other_devices_need_nothing_but_products(
    device: str, dtype: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("by_poles", "newton_schulz"):
        monkeypatch.setattr(orthogonal, name, lambda x, name=name: called.append(name) or x)
    orthogonal.factors([torch.zeros(1, 3, 4, device=device, dtype=dtype)])
    assert called == [expected]


@pytest.mark.parametrize("polar", [newton_schulz, by_poles])
def test_rotations_do_not_matter(polar: Polar) -> None:
    x, turn = matrix(1, 5, 7), torch.linalg.qr(matrix(7, 7))[0]
    torch.testing.assert_close(polar(x @ turn), polar(x) @ turn)


def test_each_quintic_is_the_best_for_what_the_last_one_left() -> None:
    """The best odd quintic for one, on an interval, has its largest error at both ends and at two places between."""
    low, high = 0.005, 1.0
    for a, b, c in QUINTICS:
        roots = torch.tensor(
            [(-3 * b - s * (9 * b * b - 20 * a * c) ** 0.5) / (10 * c) for s in (1, -1)]
        )
        x = torch.tensor([low, *roots.sqrt(), high], dtype=torch.float64)
        error = 1 - (a * x + b * x**3 + c * x**5)
        worst = float(error[0])
        signs = torch.tensor([1.0, -1, 1, -1], dtype=torch.float64)
        torch.testing.assert_close(error, worst * signs, rtol=1e-5, atol=1e-6)
        low, high = 1 - worst, 1 + worst
    assert high < 1.09


def test_the_rational_function_is_the_best_with_as_many_poles() -> None:
    """With two of them, the best one for one has its largest error at both ends and at four places between, to and fro."""
    x = torch.logspace(math.log10(0.004), 0, 100_001, dtype=torch.float64)
    error = x * (ENTIRE + sum(r / (x * x + s) for r, s in POLES)) - 1
    inner = error[1:-1]
    turns = (inner - error[:-2]) * (error[2:] - inner) < 0
    extremes = torch.cat([error[:1], inner[turns], error[-1:]])
    assert len(extremes) == 2 * len(POLES) + 2
    worst = extremes.abs().max()
    assert worst < 0.12
    signs = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(len(POLES) + 1)
    torch.testing.assert_close(extremes, worst * signs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("polar", "least", "norm", "error"),
    [(newton_schulz, 0.0051, 8, 0.09), (by_poles, 0.004, 4, 0.12)],
)
def test_singular_values_as_far_as_promised(
    polar: Polar, least: float, norm: int, error: float
) -> None:
    p, q = (torch.linalg.qr(matrix(50, 50))[0] for _ in range(2))
    strengths = torch.logspace(0, -3, 50, dtype=torch.float64)
    found = torch.linalg.svdvals(polar((p @ torch.diag(strengths) @ q.T).unsqueeze(0)))[0]
    inside = strengths > least * torch.linalg.vector_norm(strengths, norm)
    assert 0 < int((~inside).sum()) < 20
    assert found.max() < 1 + error and found[inside].min() > 1 - error


@pytest.mark.parametrize(
    ("units", "inputs", "sizes"),
    [
        (2 * GROUP + 1, WIDE + 1, [118, 118, 117]),
        (WIDE, WIDE + 9, [WIDE]),
        (WIDE + 9, 5, [WIDE + 9]),
    ],
)
def test_a_wide_layer_is_made_orthogonal_by_groups(
    units: int, inputs: int, sizes: list[int]
) -> None:
    u = matrix(units, inputs)
    alone = [by_poles(part.unsqueeze(0)).squeeze(0) for part in u.split(sizes)]
    expected = torch.cat(alone)
    if len(sizes) == 1:
        expected = expected * max(1.0, units / inputs) ** 0.5
    else:
        expected = expected / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(factor(u), expected)
    assert float(factor(u).square().sum()) == pytest.approx(units, rel=0.25)


def test_no_gradient_no_direction() -> None:
    assert factor(torch.zeros(3, 4)).abs().max() == 0
    assert of_length([torch.zeros(3)], [torch.zeros(3)], 3)[0].abs().max() == 0
    wide = torch.randn(WIDE + 1, WIDE + 1)
    wide[7] = 0.0
    assert factor(wide)[7].abs().max() == 0 and factor(wide).isfinite().all()


@pytest.mark.parametrize(
    ("layer", "shape", "units"),
    [
        (nn.Embedding(50, 6), (4,), 6),  # a dense layer's on one-hot inputs
        (nn.LayerNorm(6), (4, 6), 6),
        (nn.Conv1d(6, 4, 3, groups=2), (4, 6, 5), 4),
        (nn.ConvTranspose1d(6, 4, 3, groups=2, bias=False), (4, 6, 5), 4),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "unitwise"])
def test_a_layer_that_is_no_matrix_goes_as_far_as_one_of_as_many_units(
    layer: nn.Module, shape: tuple[int, ...], units: int, reduction: str
) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2)).double()
    x = torch.randint(50, shape) if isinstance(layer, nn.Embedding) else matrix(*shape)
    model(x)
    optimizer = qd.Riemannian(model, qd.Categorical(), reduction=reduction)
    assert optimizer.criterion is not None
    optimizer.criterion(model(x), torch.arange(4) % 2).backward()
    optimizer.step()
    (block,) = [b for b in optimizer._blocks if b.module is layer]
    assert block.units == units
    report = optimizer.auto
    assert report is not None
    went = {p: optimizer.state[p]["update"] for p in block.parameters}
    squared = float(descent.lengths(optimizer, [went])[0])
    length = abs(report.alpha) * (report.proportions[0] if report.proportions else 1.0)
    assert squared == pytest.approx(units * length**2, rel=1e-6)


def test_norms_go_as_far_as_they_would_by_their_riemannian_gradient() -> None:
    """What is no matrix takes :math:`M^{-1} v` at the length that a layer of so many units has."""
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    optimizer = qd.Riemannian(model, qd.Categorical())
    x, t = batch("categorical", 40, 5, 3)
    optimizer.criterion(model(x), t).backward()
    optimizer.step()
    (norm,) = (b for b in optimizer._blocks if not b.mixes)
    v = [matrix(6), matrix(6) - 1.0]
    expected = of_length(norm.solve(optimizer.state, v, 0.0, None), v, 6)
    stacks = optimizer._stacks.of([norm], optimizer.state)
    torch.testing.assert_close(orthogonal.steps(stacks, optimizer.state, {norm: v})[norm], expected)
    still = orthogonal.steps(stacks, optimizer.state, {norm: [torch.zeros_like(x) for x in v]})
    assert all(w.abs().max() == 0 for w in still[norm])


def test_length_in_the_metric() -> None:
    v, m = matrix(6), matrix(6).square() + 0.1
    (step,) = of_length([v / m], [v], 6)
    assert float((m * step.square()).sum()) == pytest.approx(6)


def slow_direction(optimizer: qd.Riemannian, layer: nn.Linear, v: Tensor) -> Tensor:
    """The step of a layer from its moments, unit by unit; ``v: [units, 1 + inputs]``, the bias first."""
    moments = optimizer.moments(layer)
    assert moments.m00 is not None and moments.m0i is not None and moments.mii is not None
    mean = moments.m0i / moments.m00.unsqueeze(1)
    deviation = (moments.mii - mean * moments.m0i).sqrt()
    rows = [
        torch.cat([v[k, :1] / moments.m00[k].sqrt(), (v[k, 1:] - mean[k] * v[k, 0]) / deviation[k]])
        for k in range(len(v))
    ]
    u = factor(torch.stack(rows))
    weights = u[:, 1:] / deviation
    bias = u[:, 0] / moments.m00.sqrt() - (mean * weights).sum(1)
    return torch.cat([bias.unsqueeze(1), weights], dim=1)


def slow_share(optimizer: qd.Riemannian, layer: nn.Linear, d: Tensor) -> float:
    """How many of a layer's units take part in its step, by the length of each in the metric."""
    units, columns = d.shape
    moments = optimizer.moments(layer)
    assert moments.m00 is not None and moments.m0i is not None and moments.mii is not None
    lengths = []
    for u in range(units):
        mean = moments.m0i[u] / moments.m00[u]
        variance = moments.mii[u] - mean * moments.m0i[u]
        bias = moments.m00[u] * (d[u, 0] + (mean * d[u, 1:]).sum()).square()
        lengths.append(float(bias + (variance * d[u, 1:].square()).sum()))
    usual = sum(lengths) / units
    return sum(min(1.0, 4 * x / usual) for x in lengths) / units if units > columns else 1.0


def slow_proportions(
    optimizer: qd.Riemannian,
    weights: list[Tensor],
    directions: list[Tensor],
    power: float,
    further: list[float],
) -> list[float]:
    """How far each layer goes: by the length of its weights in the metric, per unit, from the moments; and further."""
    found, shares = [], []
    for layer, w, d in zip(linear_layers(optimizer.model), weights, directions):
        moments = optimizer.moments(layer)
        assert moments.m00 is not None and moments.m0i is not None and moments.mii is not None
        variance = moments.mii - moments.m0i.square() / moments.m00.unsqueeze(1)
        found.append(float((variance * w[:, 1:].square()).sum()) / len(w))
        shares.append(slow_share(optimizer, layer, d))
    middle = math.prod(found) ** (1 / len(found))
    return [
        ((x / middle) ** (1 / 2) * s**2) ** power * math.exp(more)
        for x, s, more in zip(found, shares, further)
    ]


@pytest.mark.parametrize(("start", "inputs", "hidden"), [(0, 5, 6), (600, 5, 6), (600, 2, 20)])
def test_the_step_is_the_averaged_gradient_with_its_strengths_equalised(
    start: int, inputs: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quasidiag.auto.descent.WHOLE", 0.0
    )  # layers of a small factor are heard too
    monkeypatch.setattr(
        "quasidiag.auto.proportions.FALL", 1.0
    )  # a small network's weights may count for less at once
    model, loss = mlp(inputs, hidden, 3, activation="tanh"), qd.Categorical()
    every: dict[str, Any] = dict(metric="exact", metric_every=1, step_every=1, averaged=False)
    optimizer = qd.Riemannian(model, loss, lr=0.1, step="auto", safeguard=None, **every)
    assert optimizer.auto is not None
    optimizer.auto.steps = start
    averages = [
        torch.zeros(layer.out_features, 1 + layer.in_features) for layer in linear_layers(model)
    ]
    for seed in range(3):
        new = 1 / reach(start + seed)
        x, t = batch("categorical", 40, inputs, 3, seed=seed)
        before = [joint(layer, "data") for layer in linear_layers(model)]
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        report = optimizer.auto
        assert report is not None and report.retreats == 0
        taken = [joint(y, "data") - b for y, b in zip(linear_layers(model), before)]
        further = report.further or [0.0, 0.0]
        assert len(further) == 2 and (max(further) > 0) == (seed > 0)
        directions = []
        for i, layer in enumerate(linear_layers(model)):
            g = joint(layer, "grad")
            averages[i] = (1 - new) * averages[i] + new * g
            v = (1 - new) * averages[i] + new * g
            directions.append(slow_direction(optimizer, layer, v))
        power = 1 - FEWEST * new / 2
        proportions = slow_proportions(optimizer, before, directions, power, further)
        assert report.proportions == pytest.approx(proportions)
        for step, d, far in zip(taken, directions, proportions):
            torch.testing.assert_close(step, -report.alpha * far * d, rtol=1e-6, atol=1e-9)
        if hidden > 6:
            assert slow_share(optimizer, linear_layers(model)[0], directions[0]) < 1.0


def joint(layer: nn.Linear, what: str) -> Tensor:
    parts = [getattr(p, what).clone() for p in (layer.bias, layer.weight)]
    return torch.cat([parts[0].unsqueeze(1), parts[1]], dim=1)


def test_only_layers_whose_units_see_the_same_inputs_are_matrices() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    optimizer = qd.Riemannian(model, qd.Categorical())
    assert [block.mixes for block in optimizer._blocks] == [True, False, False, True]
    x, t = torch.randn(20, 2, 6, 6), torch.randint(3, (20,))
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.criterion(model(x), t).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_given_lr_has_no_orthogonal_directions() -> None:
    with pytest.raises(ValueError, match="only step='auto'"):
        qd.Riemannian(nn.Linear(2, 2), lr=0.1, orthogonal=True)


def test_small_layers_in_one_batch() -> None:
    us = [
        matrix(n, *shape) for n, shape in zip((1, 3, 1, 2, 1, 1, 2), (*SHAPES, (70, 80), (30, 40)))
    ]
    for found, u in zip(factors(us), us, strict=True):
        for layer, one in zip(found, u, strict=True):
            torch.testing.assert_close(layer, factor(one), rtol=1e-9, atol=1e-12)
    mixed = [us[0], us[1].float(), us[2]]
    assert [o.dtype for o in factors(mixed)] == [u.dtype for u in mixed]


def test_groups_of_wide_layers_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where calls take longer than numbers."""
    monkeypatch.setattr(orthogonal, "SMALL", {"cpu": 2**20})
    _rooms.cache_clear()
    us = [matrix(*shape) for shape in ((1, WIDE + 7, WIDE + 2), (2, WIDE + 1, 330), (1, 10, 331))]
    assert len(_rooms(tuple(Kind.of(orthogonal._apart(u)) for u in us))) == 1
    for found, u in zip(factors(us), us, strict=True):
        torch.testing.assert_close(found, factors([u], batch=False)[0], rtol=1e-9, atol=1e-12)
    _rooms.cache_clear()


def test_no_batch_is_mostly_zeros() -> None:
    us = [matrix(2, 8, 9) for _ in range(6)] + [matrix(1, 1, 400), matrix(1, 60, 50)]
    rooms = [room.members for room in _rooms(tuple(map(Kind.of, us)))]
    assert sorted(i for room in rooms for i in room) == [*range(8)] and [*range(6)] in rooms
    for found, u in zip(factors(us), us, strict=True):
        torch.testing.assert_close(found, factors([u], batch=False)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, WIDE + 5, WIDE + 3), (3, 40, 7), (3, 7, 40)])
def test_layers_of_one_shape_are_as_if_each_were_alone(shape: tuple[int, int, int]) -> None:
    u = matrix(*shape)
    for found, one in zip(factors([u], batch=False)[0], u, strict=True):
        torch.testing.assert_close(found, factor(one), rtol=1e-9, atol=1e-12)


def test_without_foreach_layers_are_taken_one_by_one() -> None:
    x, t = batch("categorical", 40, 5, 3)
    found = []
    for foreach in (None, False):
        model, loss = mlp(5, 6, 3), qd.Categorical()
        optimizer = qd.Riemannian(model, loss, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(x), t).backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("sizes", [(5, 0, 3), (5, 4, 0)])
def test_layers_without_units(sizes: tuple[int, int, int]) -> None:
    model = nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise(sizes)))
    loss = qd.Gaussian()
    optimizer = qd.Riemannian(model, loss)
    for _ in range(8):
        optimizer.zero_grad()
        loss(model(torch.randn(20, 5)), torch.randn(20, sizes[-1])).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
