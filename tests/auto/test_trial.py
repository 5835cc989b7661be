"""Steps that promise much are tried on their own minibatch. Oracle: the parabola through slope and loss, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from quasidiag.auto import quadratic
from quasidiag.auto.directions import after_step
from quasidiag.auto.parabola import Parabola
from quasidiag.auto.quadratic import PROVEN, SHORTER, SHORTEST, QuadraticModel
from quasidiag.auto.report import WARM_UP, Report


def judge(monkeypatch: pytest.MonkeyPatch, now: float, after: float) -> QuadraticModel:
    """Of a loss that is ``now``, and ``after`` the step."""
    model = QuadraticModel.__new__(QuadraticModel)
    model.report = Report()
    monkeypatch.setattr(QuadraticModel, "_compared", lambda *_: [now, after])
    return model


def unit(curvature: float) -> Parabola:
    """A model whose slope is -4, with a damping that makes its step one."""
    slope, form, damping, factor = (
        np.array(x) for x in ([-4.0], [[curvature]], [[4.0 - curvature]], [1.0])
    )
    return Parabola(slope, form, damping, factor)


@pytest.mark.parametrize(
    ("now", "after", "part"),
    [
        (5.0, 1.5, 1.0),  # as promised
        (5.0, 3.2, 1.0),  # by more than half of it
        (5.0, 4.0, SHORTER),
        (5.0, 9.0, SHORTER),
        (5.0, 6e3, SHORTEST),
        (5.0, math.inf, SHORTEST),
        (math.nan, math.nan, 1.0),  # nothing is known
    ],
)
def test_the_curvature_is_that_of_the_loss(
    now: float, after: float, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = judge(monkeypatch, now, after)._tried(unit(1.0), [], None)
    assert tried == pytest.approx(part, rel=1e-5)


def test_a_parabola_that_is_a_little_steeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins with a slope of -4 and ends at -0.9 has a curvature of 6.2, and not 4."""
    tried = judge(monkeypatch, 5.0, 4.1)._tried(unit(4.0), [], None)
    assert tried == pytest.approx(4 / 6.2, rel=1e-5)


@pytest.mark.parametrize(
    ("room", "besides", "doubt", "trust", "tries"),
    [
        (13.0, 0.0, False, 1.0, True),
        (15.0, 0.0, False, 1.0, False),
        (13.0, 3.0, False, 1.0, False),
        (math.inf, 0.0, False, 1.0, False),
        (math.inf, 0.0, True, 1.0, True),
        (math.inf, 3.0, True, 1.0, False),
        (math.inf, 0.0, False, 0.9, True),
        (math.inf, 3.0, False, 0.9, False),
    ],
)
def test_what_promises_much_is_tried_and_what_is_in_doubt(
    room: float,
    besides: float,
    doubt: bool,
    trust: float,
    tries: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = judge(monkeypatch, 5.0, 1.5)
    model.report = Report(besides=besides, unbounded=4.0, doubt=doubt, trust=trust)
    tried: list[Parabola] = []
    monkeypatch.setattr(QuadraticModel, "_tried", lambda self, p, *_: tried.append(p) or 1.0)
    part = model._trusted(unit(1.0), 1.0, [], room, None)
    assert part == (trust if tries else 1.0) and bool(tried) is tries


class Steeper:
    """Trials of a loss whose curvature is ``times`` the model's, which is one."""

    def __init__(self, times: float, monkeypatch: pytest.MonkeyPatch, steps: int = WARM_UP) -> None:
        self.times, self.trials = times, 0
        self.model = QuadraticModel.__new__(QuadraticModel)
        self.model.report = Report(unbounded=1.0, doubt=False, steps=steps)
        monkeypatch.setattr(QuadraticModel, "_tried", lambda _, parabola, *__: self.tried(parabola))

    def tried(self, parabola: Parabola) -> float:
        self.trials += 1
        return 1.0 if parabola.curved[0, 0] >= self.times else SHORTER

    def parts(self, count: int, room: float = 1.0) -> list[float]:
        return [self.model._trusted(unit(1.0), 1.0, [], room, None) for _ in range(count)]


def test_what_trials_leave_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss is always steeper than its model, steps soon begin with what most trials leave."""
    loss = Steeper(3.9, monkeypatch)
    first = loss.parts(1)
    assert first == [0.25] and loss.trials == 3 and loss.model.report.doubt
    loss.parts(20)
    loss.trials = 0
    parts = loss.parts(30)
    assert loss.trials < 45 and all(0.12 < part <= 1 / 3.9 for part in parts)
    loss.times = 1.0
    loss.parts(40)
    assert loss.model.report.trust == 1.0
    loss.trials = 0
    assert loss.parts(3, math.inf) == [1.0] * 3 and loss.trials == 0


def test_the_first_steps_leave_nothing_to_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Steeper(3.9, monkeypatch, steps=WARM_UP - 1)
    assert loss.parts(3) == [0.25] * 3 and loss.model.report.trust == 1.0


def test_a_promise_that_was_kept_is_believed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """One measured step is tried and ``PROVEN`` are not, until one fails; in doubt, each is."""
    loss = Steeper(1.0, monkeypatch)
    loss.parts(3 * (PROVEN + 1))
    assert loss.trials == 3 and loss.model.report.proven == 0
    loss.times = 3.9
    loss.trials = 0
    loss.parts(1)
    assert loss.trials == 3 and loss.model.report.doubt and loss.model.report.proven == 0
    loss.parts(1)
    assert loss.trials > 3


def test_the_first_steps_are_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Steeper(1.0, monkeypatch, steps=WARM_UP - 1)
    loss.parts(5)
    assert loss.trials == 5


def test_other_parameters_end_the_belief() -> None:
    """A step along which others move as well proves itself."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), qd.Categorical()
    model[0].requires_grad_(False)
    x = torch.randn(500, 4)
    optimizer = qd.Riemannian(model, loss, params=model.parameters(), averaged=False)
    assert optimizer.auto is not None
    for step in range(8):
        if step == 7:
            model[0].requires_grad_(True)
        optimizer.auto.proven = PROVEN if step > 4 else 0
        optimizer.zero_grad()
        loss(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        assert optimizer.auto.steady
        if step == 5:
            assert optimizer.auto.proven == PROVEN and optimizer.auto.stride == 3
    assert optimizer.auto.stride == 1 and optimizer.auto.proven == 0


def test_a_retreat_ends_the_belief() -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 3), qd.Categorical()
    x = torch.randn(500, 4)
    optimizer = qd.Riemannian(model, loss, averaged=False)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
    optimizer.auto.proven = PROVEN
    with torch.no_grad():
        model.weight.add_(50.0 * torch.randn(3, 4))
        optimizer.state[model.weight]["update"].add_(model.weight)
    before = optimizer.auto.retreats
    optimizer.zero_grad()
    loss(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
    assert optimizer.auto.retreats == before + 1 and optimizer.auto.proven == 0


@pytest.mark.parametrize("trials", [0, quadratic.TRIALS])
def test_a_first_step_through_many_layers_does_not_lead_far_up(
    trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It promises little; but where each layer's outputs are half as large again, those of all are many times."""
    monkeypatch.setattr(quadratic, "TRIALS", trials)
    torch.manual_seed(0)
    down = [nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()]
    up = [nn.ConvTranspose2d(8, 8, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 3, 1, 1)]
    model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *down, *up, nn.Flatten()).double()
    x, criterion = torch.rand(500, 64, dtype=torch.float64), qd.Gaussian(0.1).double()
    optimizer = qd.Riemannian(model, criterion)
    assert optimizer.auto is not None and optimizer.auto.doubt
    loss = criterion(model(x), x)
    loss.backward()
    optimizer.step()
    after = criterion(model(x), x)
    assert after > 2 * loss if trials == 0 else after < loss
    assert optimizer.auto.doubt is bool(trials)  # then the next one is tried and measured too
    assert not (optimizer.auto.doubt and optimizer.auto.steady)


def test_another_loss_does_not_keep_steps_in_doubt() -> None:
    """Of which nothing is known: they are not tried, and need not be measured each for that."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(4, 3).double(), qd.Gaussian().double()
    optimizer = qd.Riemannian(model, criterion)
    x = torch.randn(500, 4, dtype=torch.float64)
    output = model(x)
    (criterion(output, x[:, :3]) + 50 * (output - 1).square().sum(1).mean()).backward()
    optimizer.step()
    report = optimizer.auto
    assert report is not None and report.besides > 0.5 * report.unbounded > 0
    assert not report.doubt


def stepped() -> tuple[float, float, float]:
    """The loss of a deep linear network before and after its first step, on the minibatch itself, and what was predicted."""
    torch.manual_seed(0)
    model, loss = (
        nn.Sequential(*(nn.Linear(4, n) for n in (4, 4, 4, 4, 3))).double(),
        qd.Categorical(),
    )
    x = torch.randn(500, 4, dtype=torch.float64)
    t = x[:, :3].argmax(1)
    optimizer, losses = qd.Riemannian(model, loss), []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(loss(model(x), t))
        losses[-1].backward()
        if len(losses) == 1:
            optimizer.step()
    assert optimizer.auto is not None
    before, after = (float(x.detach()) for x in losses)
    return before, after, optimizer.auto.predicted


@pytest.mark.usefixtures("warm", "unbounded")
def test_a_step_that_would_do_harm_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, predicted = stepped()
    assert after < before + 0.5 * predicted < before
    monkeypatch.setattr(quadratic, "TRIALS", 0)
    before, after, predicted = stepped()
    assert after > 5 * before > before + predicted


def classes(count: int, steps: int) -> list[float]:
    """Half a sample a class in each minibatch, seen once."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    means = torch.randn(count, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, count))
    loss = qd.Categorical()
    optimizer, losses = qd.Riemannian(model, loss), []
    for _ in range(steps):
        t = torch.randint(count, (count // 2,), generator=generator)
        x = means[t] + 2 * torch.randn(len(t), 64, generator=generator)
        optimizer.zero_grad()
        now = loss(model(x), t)
        now.backward()
        optimizer.step()
        losses.append(float(now.detach()))
    return losses


def test_many_classes_do_not_diverge() -> None:
    """What the model promises is more than the loss in every one of the first steps, and no sign of another loss."""
    losses = classes(1000, 60)
    assert max(losses) < 1.2 * losses[0]
    assert sum(losses[-10:]) / 10 < 0.9 * losses[0]


class Scaled(nn.Module):
    """With a parameter that is in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.scale * x)


@pytest.mark.usefixtures("unbounded")
@pytest.mark.filterwarnings("ignore:no block structure")
def test_the_step_that_is_tried_is_the_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all that is in no layer has a smaller factor."""
    monkeypatch.setattr(quadratic, "LITTLE", 0.0)
    tried: list[dict[Tensor, Tensor]] = []

    def remembered(*of: Any) -> dict[Tensor, Tensor]:
        tried.append(after_step(*of))
        return tried[-1]

    monkeypatch.setattr(quadratic, "after_step", remembered)
    torch.manual_seed(0)
    model, loss = Scaled().double(), qd.Categorical()
    groups = [{"params": [*model.layer.parameters()]}, {"params": [model.scale], "lr": 0.01}]
    optimizer = qd.Riemannian(model, loss, params=groups, averaged=False)
    x = torch.randn(500, 4, dtype=torch.float64)
    loss(model(x), x[:, :3].argmax(1)).backward()
    before = model.scale.detach().clone()
    optimizer.step()
    assert len(tried) == 1 and not torch.equal(model.scale, before)
    for p in model.parameters():
        torch.testing.assert_close(p.detach(), tried[0][p], rtol=1e-12, atol=1e-12)
