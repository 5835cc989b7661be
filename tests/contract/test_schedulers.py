"""Learning-rate schedulers, with a float and with a tensor; and the step hooks of ``torch.optim``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import assert_moved, assert_same, problem, train, values
from torch.optim import lr_scheduler as schedulers

import quasidiag as qd

MAKERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedulers.StepLR(o, 2, 0.1),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=6),
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 2), schedulers.ExponentialLR(o, 0.5)], [2]
    ),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.5**epoch),
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_scheduled_run_equals_the_rates_set_by_hand(name: str, tensor: bool) -> None:
    def rate(value: float) -> Any:
        return torch.tensor(value, dtype=torch.float64) if tensor else value

    model, loss, x, t = problem()
    before = values(model)
    optimizer = qd.QDOP(model, loss, lr=rate(0.05), momentum=0.5)
    rates, momenta = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as "step() was called before the scheduler saw it"
        scheduler = MAKERS[name](optimizer) if name != "sequence" else _quietly(name, optimizer)
        for _ in range(5):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            momenta.append(float(optimizer.param_groups[0]["momentum"]))
            train(model, loss, optimizer, x, t)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if name == "sequence" else "error")
                scheduler.step()
    assert len(set(rates)) > 1
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == tensor
    assert_moved(before, model)

    by_hand, loss, x, t = problem()
    optimizer = qd.QDOP(by_hand, loss, lr=0.05, momentum=0.5)
    for lr, momentum in zip(rates, momenta, strict=True):
        optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        train(by_hand, loss, optimizer, x, t)
    assert_same(values(model), values(by_hand))


def _quietly(name: str, optimizer: Any) -> Any:
    """torch's own sequence warns about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MAKERS[name](optimizer)


def test_on_plateau() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0)
    for value in (1.0, 1.0, 1.0):
        train(model, loss, optimizer, x, t)
        scheduler.step(value)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0005)


def test_step_hooks() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    train(model, loss, optimizer, x, t)
    assert heard == ["before", "after"]


def test_averaged_weights() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(model)
    seen = []
    for _ in range(3):
        train(model, loss, optimizer, x, t)
        average.update_parameters(model)
        seen.append(values(model))
        average(x)  # in training mode, and none of the optimizer's business
    assert_same(values(average.module), [sum(group) / 3 for group in zip(*seen, strict=True)])
