"""The criterion called by keyword, and one criterion that judges two models: for fixed and automatic steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, problem, values
from torch import Tensor, nn

import quasidiag as qd

STEPS = [*({"lr": 0.05, "metric": kind} for kind in METRICS), {"metric": "exact"}]
CALLS = {
    "target by keyword": lambda loss, y, t: loss(y, target=t),
    "both by keyword": lambda loss, y, t: loss(output=y, target=t),
    "in another order": lambda loss, y, t: loss(target=t, output=y),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", STEPS, ids=str)
def test_by_keyword(options: dict[str, Any], call: str) -> None:
    ends = []
    for way in (lambda loss, y, t: loss(y, t), CALLS[call]):
        model, loss, x, t = problem()
        optimizer = qd.Riemannian(model, loss, **options)
        before = values(model)
        for _ in range(3):
            optimizer.zero_grad()
            way(loss, model(x), t).backward()
            optimizer.step()
        assert_moved(before, model)
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends)


class Named(qd.Categorical):
    """A user's own, whose arguments have other names."""

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(logits, classes)


def test_a_criterion_with_names_of_its_own() -> None:
    ends = []
    for named in (False, True):
        model, _, x, t = problem()
        loss: nn.Module = Named() if named else qd.Categorical()
        optimizer = qd.QDNat(model, loss, lr=0.05)
        (loss(classes=t, logits=model(x)) if named else loss(model(x), t)).backward()
        optimizer.step()
        ends.append(values(model))
    assert_same(*ends)


@pytest.mark.parametrize("together", [False, True])
def test_two_models_and_one_criterion_without_a_learning_rate(together: bool) -> None:
    """Each sees the minibatches of its own model only, whether the losses are summed or not."""
    (one, loss, x, t), (two, _, y, u) = problem(), problem(seed=1)
    ends = []
    for shared in (False, True):
        models = copy.deepcopy((one, two))
        losses = (loss, loss if shared else copy.deepcopy(loss))
        optimizers = [qd.Riemannian(m, c, metric="exact") for m, c in zip(models, losses)]
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            first = losses[0](models[0](x), t)
            second = losses[1](models[1](y), u)
            if together:
                (first + second).backward()
            else:
                second.backward()
                first.backward()
            for optimizer in optimizers:
                optimizer.step()
        ends.append(values(models[0]) + values(models[1]))
        assert [o.auto.steps + o.auto.retreats for o in optimizers if o.auto] == [4, 4]
        for optimizer in optimizers:
            optimizer.close()
    assert_same(*ends, 1e-10)


def test_an_output_that_was_changed_is_still_refused_without_a_learning_rate() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    before = values(model)
    loss(2 * model(x), t).backward()
    with pytest.raises(RuntimeError, match="could not find the criterion's output"):
        optimizer.step()
    assert_same(before, values(model), 0.0)
    assert torch.isfinite(model[0].weight).all()


class Weighted(qd.Categorical):
    """A user's own, with a weight for each class and a count of its calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        return nn.functional.cross_entropy(output, target, weight=self.weights)

    def residual(self, output: Tensor, target: Tensor) -> Tensor:
        return super().residual(output, target) * self.weights[target].unsqueeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_criterion_with_buffers_without_a_learning_rate(dtype: torch.dtype) -> None:
    """They are as precise as the outputs when steps are judged, and stay as they are."""
    model, _, x, t = problem()
    model, x, loss = model.to(dtype), x.to(dtype), Weighted(dtype)
    optimizer = qd.Riemannian(model, loss)
    first = float(loss(model(x), t).detach())
    for _ in range(10):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    assert optimizer.auto is not None and optimizer.auto.steps + optimizer.auto.retreats == 10
    assert float(loss(model(x), t).detach()) < first and loss.weights.dtype == dtype
    assert int(loss.count) == 12
