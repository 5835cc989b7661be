"""Another loss besides the criterion's: neither the quadratic model nor the judge knows of it, but the gradients do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quasidiag as qd
from nets import batch, digits, mlp
from quasidiag.auto import descent


def trained(weight: float, seed: int, steps: int = 80) -> tuple[float, qd.Riemannian]:
    """A classifier whose eleventh output is a regression, with such a weight: the loss of both at the end."""
    torch.manual_seed(seed)
    x, t = digits()[0][:1000].float(), digits()[1][:1000]
    y = x.sum(1) / 50
    model = nn.Sequential(
        nn.Linear(784, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 11)
    )
    criterion = qd.Categorical()
    optimizer = qd.Riemannian(model, criterion)

    def both(i: Tensor) -> Tensor:
        output = model(x[i])
        return criterion(output[:, :10], t[i]) + weight * F.mse_loss(output[:, 10], y[i])

    for _ in range(steps):
        optimizer.zero_grad()
        both(torch.randint(len(x), (200,))).backward()
        optimizer.step()
    with torch.no_grad():
        return float(both(torch.arange(len(x)))), optimizer


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("weight", [0.3, 3.0])
def test_a_second_task_is_learned_and_does_not_run_away(weight: float, seed: int) -> None:
    loss, optimizer = trained(weight, seed)
    assert loss < 1.0  # at first it is above 2.3
    assert optimizer.auto is not None and optimizer.auto.mixed


def test_without_another_loss_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> list[float]:
        raise AssertionError("the slope along the last steps is not needed here")

    model, loss = mlp(4, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, step_fraction=1.0)
    x, t = batch("categorical", 40, 4, 3)
    monkeypatch.setattr(descent, "_listen", lambda *_: None)
    for k in range(8):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        if k:
            monkeypatch.setattr(descent, "_slopes", never)
            assert not descent._overshot(optimizer, optimizer._model)  # type: ignore[arg-type]
            monkeypatch.undo()
            monkeypatch.setattr(descent, "_listen", lambda *_: None)
        optimizer.step()
    assert optimizer.auto is not None and not optimizer.auto.mixed


@pytest.mark.parametrize("kind", ["classifier", "regression"])
def test_dropout_is_no_other_loss(kind: str) -> None:
    """The criterion's slopes on a share are those of other masks, and the gradient is steeper than they are."""
    torch.manual_seed(0)
    out = 10 if kind == "classifier" else 1
    model = nn.Sequential(nn.Linear(784, 60), nn.ReLU(), nn.Dropout(0.5), nn.Linear(60, out))
    criterion = qd.Categorical() if kind == "classifier" else qd.Gaussian()
    optimizer = qd.Riemannian(model, criterion)
    x, t = digits()[0][:1000].float(), digits()[1][:1000]
    for _ in range(30):
        i = torch.randint(len(x), (300,))
        optimizer.zero_grad()
        target = t[i] if kind == "classifier" else t[i].float().unsqueeze(1) / 5
        criterion(model(x[i]), target).backward()
        optimizer.step()
        assert optimizer.auto is not None and optimizer.auto.mixture == 0


def spoilt(optimizer: qd.Riemannian) -> None:
    p = next(p for p in optimizer._group if p.grad is not None)
    p.grad.view(-1)[0] = math.nan  # type: ignore[union-attr]


def decaying(optimizer: qd.Riemannian) -> None:
    optimizer.param_groups[0]["weight_decay"] = 1.0


@pytest.mark.filterwarnings("ignore:.*skipped")
@pytest.mark.parametrize("change", [spoilt, decaying])
def test_neither_a_gradient_that_is_not_finite_nor_another_penalty_tells_of_earlier_steps(
    change: Callable[[qd.Riemannian], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss = mlp(4, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, t = batch("categorical", 40, 4, 3)
    report = optimizer.auto
    assert report is not None
    for k in range(6):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        if k == 5:
            report.mixture, report.mixture_variance = 1.0, 0.0
            monkeypatch.setattr(descent, "_slopes", lambda *_: [-2 * report.fall])  # went too far
            change(optimizer)
        optimizer.step()
    assert report.retreats == 0


@pytest.mark.parametrize(("echo", "part"), [(-0.9, None), (-1.5, 0.4), (-100.0, 0.1)])
def test_steps_that_went_too_far_are_undone(
    echo: float, part: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parabola through both slopes has its minimum at a part of them, which the damping leaves of the next step."""
    model, loss = mlp(4, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, averaged=False)
    x, t = batch("categorical", 40, 4, 3)

    def backward() -> None:
        optimizer.zero_grad()
        loss(model(x), t).backward()

    backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    report = optimizer.auto
    assert report is not None and report.stride == 1
    report.mixture, report.doubt = 1.0, False
    whole = report.curvature + report.damping
    monkeypatch.setattr(descent, "_slopes", lambda *_: [echo * report.fall])
    backward()
    with torch.no_grad():
        retreats = descent.retreat_(optimizer, optimizer._model, False, True)  # type: ignore[arg-type]
    assert retreats is (part is not None)
    undone = all(torch.allclose(p, q, rtol=1e-12) for p, q in zip(model.parameters(), before))
    assert undone is (part is not None)
    if part is not None:
        assert whole / (report.curvature + report.damping) == pytest.approx(part)
        assert report.retreats == 1 and not report.steady
