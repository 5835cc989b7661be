"""Autocast in float16 and bfloat16: activities and derivatives come in half precision, the metric stays in float32."""

from __future__ import annotations

import pytest
import torch
from loops import METRICS, assert_moved, metric, problem, train, values
from torch import Tensor, nn

import quasidiag as qd

HALF = (torch.float16, torch.bfloat16)
#: Half a unit in the last place, squared and summed over a batch; a wrong scale is off by orders of magnitude.
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 2e-1}


def moments(optimizer: qd.Riemannian, model: nn.Sequential) -> list[Tensor]:
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    return [m for layer in layers for m in optimizer.moments(layer) if m is not None]


def one_step(
    kind: str, half: torch.dtype | None, output: str
) -> tuple[qd.Riemannian, list[Tensor]]:
    model, loss, x, t = problem(output)
    model, loss, x = model.float(), loss.float(), x.float()
    t = t if output == "categorical" else t.float()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    before = values(model)
    with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
        value = loss(model(x), t)
    value.backward()
    optimizer.step()
    assert_moved(before, model)
    return optimizer, moments(optimizer, model)


@pytest.mark.parametrize("output", ["categorical", "gaussian", "bernoulli"])
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("kind", ["outer-product", "exact", "backpropagated"])
def test_metric_is_that_of_full_precision(kind: str, half: torch.dtype, output: str) -> None:
    optimizer, found = one_step(kind, half, output)
    _, expected = one_step(kind, None, output)
    assert {x.dtype for x in metric(optimizer)} == {torch.float32}
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < TOLERANCE[half]


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("kind", METRICS)
def test_backward_and_step_within_autocast(kind: str, half: torch.dtype) -> None:
    """Where they should not be called, but often are: the metric is full precision's all the same."""
    ends = []
    for enabled in (False, True):
        model, loss, x, t = problem("gaussian")
        model, loss, x, t = model.float(), loss.float(), x.float(), t.float()
        optimizer = qd.Riemannian(model, loss, lr=0.02, metric=kind, momentum=0.5)
        for _ in range(3):  # autocast remembers the weights that it cast until its context ends
            with torch.autocast("cpu", dtype=half, enabled=enabled):
                train(model, loss, optimizer, x, t)
        assert {x.dtype for x in metric(optimizer)} == {torch.float32}
        ends.append(moments(optimizer, model))
    for a, b in zip(*ends, strict=True):
        assert float((a - b).norm() / b.norm()) < 2 * TOLERANCE[half]


def test_step_within_autocast_is_the_step_outside() -> None:
    ends = []
    for within in (False, True):
        model, loss, x, t = problem()
        model, x = model.float(), x.float()
        optimizer = qd.Riemannian(model, loss, lr=0.05, reduction="unitwise")
        loss(model(x), t).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=within):
            optimizer.step()
        ends.append(values(model))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_small_derivatives_do_not_vanish_in_half_precision() -> None:
    """delta² of 1e-6 is below float16's smallest number; squares must be taken in float32."""
    model = nn.Sequential(nn.Linear(4, 3))
    loss, x = qd.Gaussian(), torch.ones(8, 4)
    optimizer = qd.QDOP(model, loss, lr=0.0)
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(x)
    loss(output.float(), output.detach().float() + 1e-4).backward()
    optimizer.step()
    m00 = optimizer.moments(model[0]).m00
    torch.testing.assert_close(m00, torch.full_like(m00, 1e-8), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("kind", ["outer-product", "exact"])
def test_bfloat16_parameters_keep_a_float32_metric_through_load_state_dict(kind: str) -> None:
    model, loss, x, t = problem()
    model, x = model.bfloat16(), x.bfloat16()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, momentum=0.9)
    train(model, loss, optimizer, x, t, 3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    kept = metric(optimizer)
    assert {m.dtype for m in kept} == {torch.float32}
    other = qd.Riemannian(model, loss, lr=0.05, metric=kind, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(kept, metric(other)))
    optimizer.close()
    before = values(model)
    train(model, loss, other, x, t)
    assert_moved(before, model)


def test_float32_checkpoint_into_bfloat16_parameters() -> None:
    model, loss, x, t = problem()
    model, x = model.float(), x.float()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t, 2)
    kept = metric(optimizer)
    optimizer.close()
    half = problem()[0].bfloat16()
    other = qd.QDOP(half, loss, lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(kept, metric(other)))
    train(half, loss, other, x.bfloat16(), t)
