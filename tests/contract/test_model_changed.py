"""A model that is not the one the optimizer was made for: told by name, before any parameter moves."""

from __future__ import annotations

import copy

import pytest
import torch
from loops import METRICS, assert_same, metric, problem, train, values
from torch import nn

import quasidiag as qd
from nets import mlp


def refuses(
    model, loss, optimizer, x, t, match: str, error: type[Exception] = RuntimeError
) -> None:
    before, kept = values(model), metric(optimizer)
    optimizer.zero_grad()
    loss(model(x), t).backward()
    with pytest.raises(error, match=match):
        optimizer.step()
    assert_same(before, values(model), 0.0)
    assert_same(kept, metric(optimizer), 0.0)


@pytest.mark.parametrize("kind", METRICS)
def test_a_layer_replaced(kind: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    train(model, loss, optimizer, x, t)
    model[0] = mlp(4, 6)[0]
    refuses(model, loss, optimizer, x, t, r"^0 is not the Linear that the optimizer was made for")


def test_a_parameter_assigned_anew() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    refuses(model, loss, optimizer, x, t, r"2\.weight is not the Parameter")


def test_a_bias_taken_away() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    model[2].bias = None
    refuses(model, loss, optimizer, x, t, r"2\.bias is not")


def test_what_is_not_trained_may_change() -> None:
    model, loss, x, t = problem()
    model.add_module("3", nn.Identity())
    model[1].register_buffer("memory", torch.zeros(2))
    optimizer = qd.QDOP(model, loss, lr=0.05, params=model[2].parameters())
    train(model, loss, optimizer, x, t)
    model[3] = nn.Dropout(0.0)
    model[1].memory = torch.ones(2)
    model[0] = mlp(4, 6, seed=5)[0]
    train(model, loss, optimizer, x, t)


def test_loading_a_checkpoint_into_the_model_is_no_change() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    train(model, loss, optimizer, x, t)


def test_block_on_two_devices() -> None:
    model, loss, _, _ = problem()
    model[0].bias = nn.Parameter(torch.zeros(6, device="meta"))
    with pytest.raises(ValueError, match="0 are on different devices"):
        qd.QDOP(model, loss, lr=0.05)


def test_model_moved_after_the_first_step() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    kept = metric(optimizer)
    model.to("meta")
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match=r"0\.weight is not the Parameter"):
        optimizer.step()
    assert_same(kept, metric(optimizer), 0.0)


def test_metric_on_another_device() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    before, state = values(model), optimizer.state[model[2].weight]
    state["mii"] = state["mii"].to("meta")
    optimizer.zero_grad()
    loss(model(x), t).backward()
    with pytest.raises(ValueError, match="2 is on cpu and its metric on meta"):
        optimizer.step()
    assert_same(before, values(model), 0.0)


def test_model_in_another_precision_goes_on() -> None:
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    model.float()
    train(model, loss, optimizer, x.float(), t)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.double()
    train(model, loss, optimizer, x, t)


def test_complex_parameters() -> None:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    with pytest.raises(TypeError, match="turn is complex"):
        qd.QDOP(Phase(), lr=0.05)


def test_layers_without_a_shape_yet() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        qd.QDOP(nn.Sequential(nn.LazyLinear(3)), lr=0.05)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (nn.CrossEntropyLoss(), r"qd\.Categorical\(\)"),
        (nn.MSELoss(), r"qd\.Gaussian\(\)"),
        (nn.BCEWithLogitsLoss(), r"qd\.Bernoulli\(\)"),
        (nn.functional.cross_entropy, "output model"),
        (qd.Categorical, r"pass an instance, Categorical\(\)"),
    ],
)
@pytest.mark.parametrize("kind", METRICS)
def test_a_criterion_that_is_no_output_model(kind: str, given: object, advice: str) -> None:
    model, _, _, _ = problem()
    with pytest.raises(TypeError, match=advice):
        qd.Riemannian(model, given, lr=0.05, metric=kind)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_reduction_beside_a_criterion() -> None:
    model, loss, _, _ = problem()
    with pytest.raises(ValueError, match="loss_reduction"):
        qd.QDOP(model, loss, lr=0.05, loss_reduction="sum")
