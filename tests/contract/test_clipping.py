"""Gradient clipping changes the gradient and not the metric."""

from __future__ import annotations

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, problem, values
from torch import nn

import quasidiag as qd

LIMIT = 1e-2


@pytest.mark.parametrize("kind", METRICS)
def test_clipped_by_norm(kind: str) -> None:
    steps, kept = [], []
    for clip in (False, True):
        model, loss, x, t = problem()
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
        before = values(model)
        loss(model(x), t).backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            assert norm > 2 * LIMIT
        optimizer.step()
        steps.append([p - q for p, q in zip(values(model), before, strict=True)])
        kept.append(metric(optimizer))
    assert_same(*kept, tolerance=0.0)
    assert_same([step * (LIMIT / norm) for step in steps[0]], steps[1], 1e-6)


def test_clipped_by_value() -> None:
    model, loss, x, t = problem()
    optimizer = qd.DOP(model, loss, lr=0.05)
    before = values(model)
    loss(model(x), t).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert_moved(before, model)
    for layer, i in ((model[0], 0), (model[2], 2)):
        m00, _, mii = optimizer.moments(layer)
        for p, q, g, m in (
            (layer.weight, before[i], gradients[i], mii),
            (layer.bias, before[i + 1], gradients[i + 1], m00),
        ):
            torch.testing.assert_close(p.detach(), q - 0.05 * g / (m + 1e-8))
