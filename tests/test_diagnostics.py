"""``qd.diagnostics`` against its definitions, as a table, a dictionary and TensorBoard's scalars."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import quasidiag as qd
from nets import batch, mlp

sys.path.insert(0, str(Path(__file__).parent / "auto"))
from test_model import dense_metric, flat


def trained(steps: int = 4, **options: object) -> tuple[nn.Sequential, qd.Riemannian]:
    model, loss = mlp(5, 6, 3, activation="tanh"), qd.Categorical()
    # By default without an lr, but with steps that are short enough to be kept.
    options = {"lr": 0.1, "step": "auto", **options} if "lr" not in options else options
    optimizer = qd.Riemannian(model, loss, **options)  # type: ignore[arg-type]
    for step in range(steps):
        x, t = batch("categorical", 40, 5, 3, seed=step)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("steps", [4, 7])
def test_the_way_is_as_long_as_in_the_dense_metric(steps: int) -> None:
    model, optimizer = trained(steps)
    found = qd.diagnostics(optimizer)
    dense = dense_metric(optimizer)
    update = flat(optimizer.state[p]["update"] for p in model.parameters())
    expected = float(update @ dense @ update)
    assert sum(layer.moved for layer in found.layers) == pytest.approx(expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
def test_all_layers_ways_add_up_to_the_steps(reduction: str, weight_decay: float) -> None:
    _, optimizer = trained(4, reduction=reduction, weight_decay=weight_decay)
    found = qd.diagnostics(optimizer)
    assert found.step is not None and found.step.length > 0
    assert sum(layer.moved for layer in found.layers) == pytest.approx(found.step.length)


def test_the_way_of_one_step_is_the_steps_and_the_table_says_of_how_many_it_is() -> None:
    _, optimizer = trained(4)
    found = qd.diagnostics(optimizer)
    assert found.step is not None and found.step.stride == 1
    assert sum(layer.moved for layer in found.layers) == pytest.approx(found.step.length)
    assert str(found).endswith("over the last 1 step")
    _, optimizer = trained(7)
    found = qd.diagnostics(optimizer)
    assert found.step is not None and found.step.stride > 1
    assert sum(layer.moved for layer in found.layers) > 1.5 * found.step.length
    assert str(found).endswith(f"over the last {found.step.stride} steps")
    assert str(found).splitlines()[0].endswith(" moved")
    assert "0/moved" in found.scalars() and "0/length" not in found.scalars()


def test_an_optimizer_without_a_metric_is_refused() -> None:
    with pytest.raises(TypeError, match="AdaGrad has none: expected"):
        qd.diagnostics(qd.AdaGrad(mlp(5, 6, 3).parameters(), lr=1e-3))  # type: ignore[arg-type]


def test_condition_is_that_of_the_centred_metric() -> None:
    model, optimizer = trained(safeguard=None)
    m00, m0i, mii = (m for m in optimizer.moments(model[0]))
    assert m00 is not None and m0i is not None and mii is not None
    entries = torch.cat([m00.unsqueeze(1), mii - m0i**2 / m00.unsqueeze(1)], dim=1)
    expected = float((entries.amax(1) / entries.amin(1)).median())
    assert qd.diagnostics(optimizer).layers[0].condition == pytest.approx(expected)


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
def test_every_reduction(reduction: str) -> None:
    _, optimizer = trained(reduction=reduction, metric_every=1)
    found = qd.diagnostics(optimizer)
    assert [layer.reduction for layer in found.layers] == [reduction] * 2
    for layer in found.layers:
        assert layer.condition >= 1 and layer.moved > 0 and layer.dead == 0 == layer.floored
        assert layer.updates == 4
    assert found.step == optimizer.auto and found.step is not optimizer.auto


def test_dead_units_and_inputs_that_never_vary() -> None:
    model, loss = mlp(5, 6, 3, activation="relu"), qd.Categorical()
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([-1e6, -1e6, 10, 10, 10, 10]))  # two are off for ever
    optimizer = qd.QDOP(model, loss, lr=1e-2, eps=0.0, floor=0.0)
    x, t = batch("categorical", 40, 5, 3)
    x[:, 0] = 3.0
    loss(model(x), t).backward()
    optimizer.step()
    first, second = qd.diagnostics(optimizer).layers
    assert first.dead == pytest.approx(2 / 6)
    assert first.floored == pytest.approx((2 * 6 + 4 * 1) / 36)
    assert second.dead == 0
    assert second.floored == pytest.approx(2 / 7)
    assert math.isnan(first.moved)


def test_a_floor_shows() -> None:
    _, plain = trained(lr=1e-3)
    _, bounded = trained(lr=1e-3, floor=1e3)
    assert qd.diagnostics(plain).layers[0].floored == 0
    assert qd.diagnostics(bounded).layers[0].floored == pytest.approx(5 / 6)


def test_the_table_remarks_on_dead_units_and_on_what_is_in_no_layer() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = mlp(5, 6, 3, activation="relu"), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    model, loss = Scaled().double(), qd.Categorical()
    with torch.no_grad():
        model.inner[0].bias.copy_(torch.tensor([-1e6, -1e6, 10, 10, 10, 10]))
    with pytest.warns(
        UserWarning, match=r"no block structure is known for scale \(Scaled\)"
    ) as said:
        optimizer = qd.QDOP(model, loss, lr=1e-2)
    assert said[0].filename == __file__  # and not a line of the library's
    x, t = batch("categorical", 40, 5, 3)
    loss(model(x), t).backward()
    optimizer.step()
    *_, dead, others = str(qd.diagnostics(optimizer)).splitlines()
    assert dead.startswith("inner.0: the loss hardly depends on 33% of the units")
    assert others == "by the diagonal rule of qd.AdaGrad: scale"


def test_before_the_first_step_there_is_nothing() -> None:
    model, loss = mlp(5, 6, 3), qd.Categorical()
    found = qd.diagnostics(qd.Riemannian(model, loss))
    assert found.layers == [] and found.steps == 0 and "step 0" in str(found)


def test_convolutions_norms_and_layers_without_a_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2),
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 2, 1, bias=False),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=0.1, step="auto")
    x, t = torch.randn(20, 1, 3, 3), torch.arange(20) % 3
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    found = qd.diagnostics(optimizer)
    assert [layer.layer for layer in found.layers] == ["Conv2d", "BatchNorm2d", "Conv2d", "Linear"]
    assert all(layer.moved > 0 for layer in found.layers)


def test_table_dictionary_and_scalars() -> None:
    _, optimizer = trained()
    found = qd.diagnostics(optimizer)
    lines = str(found).splitlines()
    assert len(lines) == 6 and lines[1].startswith("0 ") and "alpha" in lines[3]
    assert found.step is not None and f"by {found.step.actual:.3g}" in lines[4]
    assert json.loads(json.dumps(found.as_dict()))["layers"][0]["units"] == 6
    written: dict[str, tuple[float, int]] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name] = value, step

    found.log(Writer())
    assert written["quasidiag/0/condition"] == (found.layers[0].condition, 4)
    assert optimizer.auto is not None
    assert written["quasidiag/step/alpha"] == (optimizer.auto.alpha, 4)


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    _, optimizer = trained()
    with tensorboard.SummaryWriter(tmp_path) as writer:
        qd.diagnostics(optimizer).log(writer, 7)
    assert list(tmp_path.iterdir())


def test_unitwise_entries_are_those_of_the_solve() -> None:
    """With the safeguards, nothing is floored but what never varied."""
    _, optimizer = trained(4, reduction="unitwise")
    _, bare = trained(4, reduction="unitwise", safeguard=None)
    for layer, raw in zip(qd.diagnostics(optimizer).layers, qd.diagnostics(bare).layers):
        assert layer.condition < raw.condition and layer.floored <= raw.floored
