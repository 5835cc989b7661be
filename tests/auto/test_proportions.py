"""How far the layers go, relative to each other: by the length of their weights in the metric, and by their echoes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, linear_layers, mlp
from quasidiag.auto.orthogonal import WIDE
from quasidiag.auto.proportions import (
    FALL,
    FURTHER,
    GROWTH,
    NEW,
    UNEVEN,
    echoes,
    further,
    power,
    proportions,
    share,
    shares,
    strengths,
    weights,
)
from quasidiag.auto.proposal import FEWEST, MOST, PART, reach
from quasidiag.blocks import DiagonalBlock
from quasidiag.unitwise import UnitwiseBlock


def trained(model: nn.Module, steps: int = 3, late: bool = False, **options: Any) -> qd.Riemannian:
    """By minibatches of five inputs and three outputs; ``late`` after many others, as far as it knows."""
    optimizer = qd.Riemannian(model, qd.Categorical(), **options)
    if late:
        trained_on(optimizer, 1)
        assert optimizer.auto is not None
        optimizer.auto.steps, steps = 1001, steps - 1
    return trained_on(optimizer, steps)


def trained_on(optimizer: qd.Riemannian, steps: int) -> qd.Riemannian:
    assert optimizer.criterion is not None
    for seed in range(steps):
        x, t = batch("categorical", 40, 5, 3, seed=seed)
        optimizer.zero_grad()
        optimizer.criterion(optimizer.model(x), t).backward()
        optimizer.step()
    return optimizer


def measured(
    optimizer: qd.Riemannian,
    before: Sequence[float | None] = (),
    blocks: Sequence[DiagonalBlock] = (),
) -> list[float]:
    blocks, state = blocks or optimizer._blocks, optimizer.state
    squares = weights(blocks, optimizer._stacks.of(blocks, state), state)
    return strengths(squares, before or [None] * len(blocks))


def test_the_power_grows_with_the_average() -> None:
    powers = [power(reach(steps) / FEWEST) for steps in range(3000)]
    first = int(PART * FEWEST)
    assert powers[: first + 1] == [0.5] * (first + 1) and powers == sorted(powers)
    assert powers[2 * first] == 0.75 and powers[-1] == 1 - FEWEST / MOST / 2 > 0.9


def test_they_are_those_of_the_variances_and_the_weights() -> None:
    optimizer = trained(mlp(5, 7, 6, 3), safeguard=None)
    expected = []
    for layer in linear_layers(optimizer.model):
        moments = optimizer.moments(layer)
        assert moments.m00 is not None and moments.m0i is not None and moments.mii is not None
        variance = moments.mii - moments.m0i.square() / moments.m00.unsqueeze(1)
        expected.append((variance * layer.weight.detach().square()).sum(1).mean().sqrt())
    lengths = torch.stack(expected)
    lengths = lengths / lengths.log().mean().exp()
    for p in (0.3, 1.0):
        found = proportions(measured(optimizer), [1.0] * 3, p, [0.0] * 3)
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), lengths**p)


@pytest.mark.parametrize("bias", [True, False])
def test_the_unitwise_metric_has_them_too(bias: bool) -> None:
    """With the bias that makes the length of a unit's weights the least."""
    model = nn.Sequential(nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = trained(model, reduction="unitwise")
    first = optimizer._blocks[0]
    assert isinstance(first, UnitwiseBlock)
    expected = []
    for w, matrix in zip(first.weight.detach(), first._guarded(optimizer.state)):
        whole = w @ matrix[-5:, -5:] @ w
        if bias:
            best = -(matrix[0, 1:] @ w) / matrix[0, 0]
            row = torch.cat([best.unsqueeze(0), w])
            whole = row @ matrix @ row
        expected.append(float(whole))
    assert float(first.strength(optimizer.state)) == pytest.approx(sum(expected) / 7)


@pytest.mark.parametrize("factor", [0.0, 1e-9, 1e9])
def test_a_layer_of_zeros_goes_as_far_as_the_mean_and_no_other_much_further(factor: float) -> None:
    optimizer = trained(mlp(5, 7, 6, 3))
    with torch.no_grad():
        linear_layers(optimizer.model)[1].weight.mul_(factor)
    found = proportions(measured(optimizer), [1.0] * 3, 1.0, [0.0] * 3)
    assert all(1 / UNEVEN <= x <= UNEVEN for x in found)
    if factor:
        assert found[1] == pytest.approx(UNEVEN if factor > 1 else 1 / UNEVEN)
    else:
        assert found[1] == 1.0 and found[0] * found[2] == pytest.approx(1.0)


@pytest.mark.parametrize("factor", [0.0, 0.01])
def test_a_layer_that_is_made_anew_goes_as_far_as_before(factor: float) -> None:
    """Its weights count for nothing; if it went no further than they say, it would not grow."""
    optimizer = trained(mlp(5, 7, 6, 3))
    before = measured(optimizer)
    with torch.no_grad():
        linear_layers(optimizer.model)[1].weight.mul_(factor)
    found = measured(optimizer, before)
    assert found == pytest.approx(
        [before[0] + FALL / 3, before[1] - FALL * 2 / 3, before[2] + FALL / 3]
    )
    for _ in range(1000):
        found = measured(optimizer, found)
    assert found[1] < before[1] - 3
    if factor:
        assert found == pytest.approx(measured(optimizer))


def test_what_falls_slowly_is_as_it_is() -> None:
    optimizer = trained(mlp(5, 7, 6, 3))
    kept = measured(optimizer)
    with torch.no_grad():
        for layer, factor in zip(linear_layers(optimizer.model), (3.0, 0.995, 1.01)):
            layer.weight.mul_(factor)
    assert measured(optimizer, kept) == pytest.approx(measured(optimizer))


def test_a_layer_is_compared_with_itself() -> None:
    """Also where others rest: what is known of a layer is kept by layer."""
    model = mlp(5, 7, 6, 3)
    first, _, last = linear_layers(model)
    with torch.no_grad():
        first.weight.mul_(20.0)
    optimizer = qd.Riemannian(model, qd.Categorical(), step_every=1)
    report = optimizer.auto
    assert report is not None
    last.requires_grad_(False)
    trained_on(optimizer, 3)
    assert report.strengths[2] is None and None not in report.strengths[:2]
    known = report.strengths[1]
    first.requires_grad_(False)
    last.requires_grad_(True)
    trained_on(optimizer, 2)  # what thaws waits for its metric
    assert known is not None and report.strengths[0] is not None and report.strengths[0] > known
    assert report.strengths[1:] == pytest.approx(expected_alone(optimizer, [1, 2]), abs=0.1)


def test_a_bias_alone_does_not_move_what_the_others_are_measured_by() -> None:
    """It has no weights, and never will: its strength does not fall, and theirs do not rise for it."""
    model, loss = mlp(5, 6, 4, 3), qd.Categorical()
    model[0].weight.requires_grad_(False)
    optimizer = qd.Riemannian(model, loss, step_every=1)
    x, t = batch("categorical", 40, 5, 3)
    for _ in range(12):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        assert optimizer.auto is not None
        first, *others = optimizer.auto.strengths
        assert first == 0
        assert sum(x for x in others if x is not None) == pytest.approx(0, abs=1e-9)


def expected_alone(optimizer: qd.Riemannian, which: list[int]) -> list[float]:
    """The strengths of some layers, as if nothing had been known of them."""
    blocks = [optimizer._blocks[i] for i in which]
    return measured(optimizer, blocks=blocks)


@pytest.mark.parametrize("options", [{"orthogonal": False}, {"reduction": "unitwise"}])
def test_directions_that_are_not_equalised_have_their_own_lengths(options: dict[str, Any]) -> None:
    optimizer = trained(mlp(5, 7, 3), **options)
    assert optimizer.auto is not None and optimizer.auto.proportions == []


def test_steps_in_between_keep_them() -> None:
    optimizer = trained(mlp(5, 7, 3), steps=4, late=True)
    report = optimizer.auto
    assert report is not None and report.stride > 1
    kept = list(report.proportions)
    with torch.no_grad():  # what nobody looks at until the next measurement
        linear_layers(optimizer.model)[0].weight.mul_(1.1)
    assert measured(optimizer) != pytest.approx(report.strengths, rel=1e-3)
    x, t = batch("categorical", 40, 5, 3, seed=6)
    assert optimizer.criterion is not None
    optimizer.zero_grad()
    optimizer.criterion(optimizer.model(x), t).backward()
    optimizer.step()
    assert report.stride > 1 and report.proportions == kept


@pytest.mark.parametrize(
    ("idle", "expected"), [(0.0, 0.5), (0.25, 0.5 + 0.5 * 8 / 17), (0.6, 1.0), (1.0, 1.0)]
)
def test_the_share_of_units_that_take_part(idle: float, expected: float) -> None:
    """Half of the units go by ``idle`` times what the others do: a quarter of it is not half of what is usual."""
    rows = torch.nn.functional.normalize(torch.randn(40, 8, dtype=torch.float64), dim=1)
    rows[20:] *= idle
    assert float(share((3.0 * rows).square().sum(-1))) == pytest.approx(expected)
    assert float(share(torch.zeros(40))) == 1.0


@pytest.mark.parametrize("late", [False, True])
def test_pixels_that_are_always_black_do_not_make_the_others_go_further(late: bool) -> None:
    """Twenty of thirty outputs say nothing, and are to say nothing."""
    model, loss = mlp(5, 7, 30), qd.Gaussian(1.0)
    with torch.no_grad():
        for p in linear_layers(model)[1].parameters():
            p[10:] = 0.0
    x, _ = batch("categorical", 40, 5, 3)
    t = torch.cat([x.sum(1, keepdim=True).expand(40, 10), torch.zeros(40, 20)], dim=1)
    optimizer = qd.Riemannian(model, loss)
    report = optimizer.auto
    assert report is not None
    report.steps = 1000 if late else 0
    optimizer.zero_grad()
    loss(model(x), t).backward()
    optimizer.step()
    first, last = report.strengths
    p = power(reach(report.steps - 1) / FEWEST)
    assert first is not None and last is not None and first == pytest.approx(-last)
    expected = [math.exp(p * first), math.exp(p * last) * (1 / 3) ** (2 * p)]
    assert report.proportions == pytest.approx([min(max(x, 1 / UNEVEN), UNEVEN) for x in expected])


@pytest.mark.parametrize(
    ("inputs", "units", "asked"), [(5, 40, True), (5, 7, True), (5, 6, False), (40, 3, False)]
)
def test_only_more_units_than_inputs_need_to_take_part(
    inputs: int, units: int, asked: bool
) -> None:
    """A bias is an input too."""
    model, loss = mlp(inputs, units), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, t = batch("categorical", 40, inputs, units)
    loss(model(x), t).backward()
    optimizer.step()
    (block,) = optimizer._blocks
    step = [torch.ones_like(p) for p in block.parameters]
    for p in step:
        p[0] = 0.0
    stacks = optimizer._stacks.of([block], optimizer.state)
    found = shares(stacks, optimizer.state, {block: step})
    assert found.keys() == ({block} if asked else set())
    assert all(share < 1.0 for share in found.values())


def test_units_that_each_go_by_one_are_not_asked() -> None:
    """As in a wide layer, whatever some of them do."""
    model, loss = mlp(WIDE + 1, WIDE + 20), qd.Gaussian(1.0)
    optimizer = qd.Riemannian(model, loss)
    x = torch.randn(20, WIDE + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss(model(x), torch.zeros(20, WIDE + 20, dtype=torch.float64)).backward()
    optimizer.step()
    (block,) = optimizer._blocks
    step = [torch.ones_like(p) for p in block.parameters]
    for p in step:
        p[::2] = 0.0
    stacks = optimizer._stacks.of([block], optimizer.state)
    assert shares(stacks, optimizer.state, {block: step}) == {}


def test_a_layer_goes_as_far_as_they_say() -> None:
    """In the metric, a unit of every layer: which is what the strengths are brought to."""
    optimizer = trained(mlp(5, 7, 6, 3), steps=4, late=True, safeguard=None, step_every=1)
    report, blocks = optimizer.auto, optimizer._blocks
    assert report is not None and report.stride == 1
    found: list[float] = []
    for block in blocks:
        step: list[Tensor] = [optimizer.state[p]["update"] for p in block.parameters]
        rows = block.rows_of(step)[-1].shape
        (stack,) = optimizer._stacks.of([block], optimizer.state)
        lengths = float(stack.forms(optimizer.state, [[step]]))
        found.append(math.sqrt(lengths / min(rows[0], rows[1] + 1)) / report.alpha)
    # Singular values are about one, and a tall layer's columns are longer than one.
    scale = [math.sqrt(max(1.0, len(b.parameters[0]) / 6)) for b in blocks]
    assert found == pytest.approx([p * s for p, s in zip(report.proportions, scale)], rel=0.15)


def test_a_layer_that_finds_its_slope_as_it_was_goes_further() -> None:
    """While others cross their valleys: none of these goes less far for that."""
    falls, slopes = [-1.0, -2.0, -4.0], [-0.8, 1.0, 2.0]
    heard, more = [0.0] * 3, [0.0] * 3
    for _ in range(3):
        heard = echoes(heard, slopes, falls)
        before, more = more, further(more, heard, falls)
        usual = heard[0] / 3
        assert more == pytest.approx([before[0] + GROWTH * (heard[0] - usual), 0.0, 0.0])
    assert heard == pytest.approx([x * (1 - (1 - NEW) ** 3) for x in (0.8, -0.5, -0.5)])
    for _ in range(100):
        more = further(more, heard, falls)
    assert more == pytest.approx([math.log(FURTHER), 0.0, 0.0])
    assert proportions([0.3, 0.0, -0.3], [1.0] * 3, 0.5, more)[0] == pytest.approx(
        FURTHER * math.exp(0.15)
    )
    heard = echoes(heard, [1.0, 1.0, 1.0], falls)
    assert heard[0] < 0 and further(more, heard, falls)[0] == pytest.approx(
        more[0] + GROWTH * heard[0]
    )


def test_layers_that_find_the_same_go_on_as_before() -> None:
    more = further([0.1, 0.2], echoes([0.0, 0.0], [-1e9, -0.3], [-1.0, -0.1]), [-1.0, -0.1])
    assert more == pytest.approx([0.1, 0.2])


def test_a_layer_that_did_not_descend_has_no_say() -> None:
    heard = echoes([0.4, 0.3, 0.2], [-1.0, -1.0, -1.0], [-2.0, 0.0, 3.0])
    assert heard == pytest.approx([0.4 + NEW * 0.1, 0.3, 0.2])
    assert further([0.1, 0.2, 0.3], heard, [-2.0, 0.0, 3.0]) == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("every", [1, 4])
def test_echoes_are_those_of_the_steps_that_were_measured(every: int) -> None:
    """Against slopes from the parameters themselves."""
    torch.manual_seed(0)
    model, loss = mlp(5, 7, 6, 3), qd.LearnedGaussian(3).double()
    optimizer = qd.Riemannian(model, loss, step="auto", step_every=every, averaged=False)
    report, layers = optimizer.auto, [[*layer.parameters()] for layer in linear_layers(model)]
    assert report is not None
    falls, places, listened = [0.0] * 3, [[p.detach().clone() for p in y] for y in layers], 0
    expected, more = [0.0] * 3, [0.0] * 3
    for seed in range(14):
        x, t = batch("gaussian", 40, 5, 3, seed=seed)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        grads = [[p.grad.clone() for p in y if p.grad is not None] for y in layers]
        now = [[p.detach().clone() for p in y] for y in layers]
        stride, retreats = report.stride, report.retreats
        optimizer.step()
        if stride == 1 and report.retreats == retreats:
            slopes = [slope(g, a, b) for g, a, b in zip(grads, places, now)]
            expected = echoes(expected, slopes, falls)
            more = further(more, expected, falls)
            listened += 1
        assert report.echoes == pytest.approx(expected if listened else [])
        assert report.further == pytest.approx(more if listened else [])
        after = [[p.detach().clone() for p in y] for y in layers]
        falls, places = [slope(g, a, b) for g, a, b in zip(grads, now, after)], now
        if report.stride == 1:
            assert report.falls == pytest.approx([*falls, 0.0])
    assert listened > 3 and max(more) > 0


def test_layers_that_come_later_are_heard_from_then_on() -> None:
    torch.manual_seed(0)
    model = mlp(5, 7, 6, 3)
    first, *others = linear_layers(model)
    given = [p for layer in others for p in layer.parameters()]
    optimizer = trained_on(qd.Riemannian(model, qd.Categorical(), params=given), 9)
    report = optimizer.auto
    assert report is not None and len(report.further) == 2
    optimizer.add_param_group({"params": [*first.parameters()]})
    trained_on(optimizer, 9)
    assert len(report.further) == len(report.echoes) == len(optimizer._blocks) == 3


def test_all_layers_may_come_later() -> None:
    torch.manual_seed(0)
    model = mlp(5, 7, 3)
    for p in model.parameters():
        p.requires_grad_(False)
    optimizer = qd.Riemannian(model, qd.Categorical(), params=[{"params": []}])
    model(torch.randn(4, 5, dtype=torch.float64))
    for p in model.parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": [*model.parameters()]})
    assert len(trained_on(optimizer, 9).state) == 4


def test_lists_of_another_network_are_begun_anew() -> None:
    optimizer = trained(mlp(5, 7, 6, 3), steps=9)
    for name, kept in (("further", [0.5]), ("further", [0.5] * 5), ("echoes", [0.5] * 2)):
        state = optimizer.state_dict()
        state["auto"][name] = kept
        other = qd.Riemannian(mlp(5, 7, 6, 3), qd.Categorical())
        other.load_state_dict(state)
        trained_on(other, 9)
        assert other.auto is not None
        assert len(other.auto.further) == len(other.auto.echoes) == 3


@pytest.mark.parametrize("silent", ["short", "frozen"])
def test_a_layer_that_was_kept_short_has_no_say(silent: str) -> None:
    """Its slope is as it was because somebody said so; or nobody knows what is left of it."""
    torch.manual_seed(0)
    model = mlp(5, 7, 6, 3)
    *others, last = linear_layers(model)
    lr = 0.01 if silent == "short" else 1.0
    groups = [
        {"params": [p for layer in others for p in layer.parameters()]},
        {"params": [*last.parameters()], "lr": lr},
    ]
    optimizer = qd.Riemannian(model, qd.Categorical(), params=groups, step_every=1)
    for _ in range(20):
        trained_on(optimizer, 1)
        last.requires_grad_(silent == "short" or not last.weight.requires_grad)
    report = optimizer.auto
    assert report is not None and report.echoes[2] == report.further[2] == 0.0
    assert report.echoes[0] != 0 != report.echoes[1]


def slope(gradients: list[Tensor], start: list[Tensor], end: list[Tensor]) -> float:
    return sum(float((g * (b - a)).sum()) for g, a, b in zip(gradients, start, end))


def test_they_do_not_depend_on_how_inputs_are_encoded() -> None:
    scale, shift = torch.tensor([1.0, 3.0, -0.2, 10.0, 0.5]).double(), torch.arange(5.0).double()
    found = []
    for a, b in ((torch.ones_like(scale), torch.zeros_like(shift)), (scale, shift)):
        torch.manual_seed(0)
        model, loss = mlp(5, 40, 6, 3), qd.Categorical()
        first = linear_layers(model)[0]
        with torch.no_grad():
            first.weight.div_(a)
            first.bias.sub_(first.weight @ b)
        optimizer = qd.Riemannian(model, loss, metric="exact", safeguard=None)
        x, t = batch("categorical", 40, 5, 3)
        loss(model(x * a + b), t).backward()
        optimizer.step()
        assert optimizer.auto is not None
        found.append((optimizer.auto.strengths, optimizer.auto.proportions))
    assert found[0][0] == pytest.approx(found[1][0]) and max(map(abs, found[0][0])) > 0.05
    assert found[0][1] == pytest.approx(found[1][1])
