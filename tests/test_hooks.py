"""The optimizer watches training only, holds on to nothing, and can leave."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, criterion, linear_layers, mlp
from quasidiag.probe import reaches

METRICS = ["outer-product", "monte-carlo", "exact", "backpropagated"]


def setup(metric: str, n: int = 8) -> tuple:
    model, loss = mlp(5, 4, 3), criterion("categorical")
    optimizer = qd.Riemannian(model, loss, lr=0.01, metric=metric)
    return model, loss, optimizer, *batch("categorical", n, 5, 3)


def hooks(module: nn.Module) -> int:
    names = [name for name in vars(module) if name.endswith("_hooks")]
    return sum(len(getattr(m, name)) for m in module.modules() for name in names)


@pytest.mark.parametrize("metric", METRICS)
def test_nothing_runs_in_evaluation_or_under_no_grad(metric: str) -> None:
    """A validation pass between forward and step changes nothing at all, the draws included."""
    results = []
    for validate in (False, True):
        model, loss, optimizer, x, t = setup(metric)
        other = torch.randn(50, 5, dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(model(x), t)
            if validate:
                with torch.no_grad():
                    loss(model(other), torch.zeros(50, dtype=torch.long))
            value.backward()
            if validate:
                model.eval()
                loss(model(other), torch.zeros(50, dtype=torch.long))
                model.train()
                with torch.no_grad():
                    loss(model(other), torch.zeros(50, dtype=torch.long))
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
        results[-1].append(optimizer.moments(model[0]).mii)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_evaluation_keeps_no_activity_alive(metric: str, how: str) -> None:
    model, loss, optimizer, x, t = setup(metric)
    seen: list[weakref.ref] = []
    handle = model[2].register_forward_pre_hook(lambda m, args: seen.append(weakref.ref(args[0])))
    if how == "eval":
        model.eval()
        value = loss(model(x), t)
        del value
    else:
        with torch.no_grad():
            loss(model(x), t)
    gc.collect()
    assert [ref() for ref in seen] == [None]
    handle.remove()
    optimizer.close()


@pytest.mark.parametrize("metric", METRICS)
def test_no_reference_to_a_batch_survives_the_step(metric: str) -> None:
    model, loss, optimizer, _, _ = setup(metric)
    seen: list[weakref.ref] = []
    watch = [
        layer.register_forward_hook(
            lambda m, args, out: seen.extend([weakref.ref(args[0]), weakref.ref(out)])
        )
        for layer in linear_layers(model)
    ]

    def step() -> None:
        x, t = batch("categorical", 8, 5, 3)
        seen.extend([weakref.ref(x), weakref.ref(t)])
        value = loss(model(x), t)
        value.backward()
        seen.append(weakref.ref(value))
        optimizer.step()

    for _ in range(2):
        optimizer.zero_grad()
        step()
        gc.collect()
        assert len(seen) >= 7
        assert [ref() for ref in seen if ref() is not None] == []
        seen.clear()
    for handle in watch:
        handle.remove()


@pytest.mark.parametrize("metric", METRICS)
def test_no_reference_survives_a_skipped_or_failed_step(metric: str) -> None:
    model, loss, optimizer, x, t = setup(metric)
    bad = torch.full_like(x, float("nan"))
    ref = weakref.ref(bad)
    loss_value = loss(model(bad), t)
    loss_value.backward()
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    del bad, loss_value
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("metric", METRICS)
def test_close_leaves_no_hook_behind(metric: str) -> None:
    model, loss = mlp(5, 4, 3), criterion("categorical")
    before = hooks(model), hooks(loss)
    optimizer = qd.Riemannian(model, loss, lr=0.01, metric=metric)
    assert (hooks(model), hooks(loss)) != before
    x, t = batch("categorical", 8, 5, 3)
    loss(model(x), t).backward()
    optimizer.step()
    optimizer.close()
    optimizer.close()  # twice is once
    assert (hooks(model), hooks(loss)) == before
    assert optimizer.state_dict()["state"]
    assert optimizer.moments(model[0]).mii.shape == model[0].weight.shape


def test_context_manager_closes() -> None:
    model, loss = mlp(5, 4, 3), criterion("categorical")
    before = hooks(model), hooks(loss)
    with qd.QDNat(model, loss, lr=0.01) as optimizer:
        x, t = batch("categorical", 8, 5, 3)
        loss(model(x), t).backward()
        optimizer.step()
    assert (hooks(model), hooks(loss)) == before
    with pytest.raises(ZeroDivisionError), qd.QDNat(model, loss, lr=0.01):
        raise ZeroDivisionError
    assert (hooks(model), hooks(loss)) == before


@pytest.mark.parametrize("metric", METRICS)
def test_an_optimizer_that_is_dropped_lets_the_model_live_on(metric: str) -> None:
    model, loss, optimizer, x, t = setup(metric)
    ref = weakref.ref(optimizer)
    loss(model(x), t).backward()
    optimizer.step()
    del optimizer
    gc.collect()
    assert ref() is None
    loss(model(x), t).backward()  # hooks of a dead optimizer do nothing


def test_copies_of_the_model_are_not_watched() -> None:
    model, loss, optimizer, x, t = setup("exact")
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (twin, thawed):
        assert torch.equal(other(x), model(x))
        other(x).sum().backward()
    optimizer.zero_grad()
    loss(model(x), t).backward()
    optimizer.step()


def test_two_optimizers_one_after_the_other() -> None:
    model, loss = mlp(5, 4, 3), criterion("categorical")
    x, t = batch("categorical", 8, 5, 3)
    for maker in (qd.QDOP, qd.QDNat, qd.DMCNat):
        with maker(model, loss, lr=0.01) as optimizer:
            for _ in range(2):
                optimizer.zero_grad()
                loss(model(x), t).backward()
                optimizer.step()


def test_a_function_may_call_something_of_its_own_a_variable() -> None:
    """Only where gradients are added up is a parameter reached."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.variable = w
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient * 2, None

    model = mlp(5, 4, 3)
    w, x = linear_layers(model)[-1].weight, torch.randn(6, 5, dtype=torch.float64)
    found = []
    output = model(x.requires_grad_())
    scaled = Scaled.apply(output, w)
    scaled.register_hook(lambda _: found.append(reaches(scaled, model.parameters())))
    torch.autograd.grad(scaled.sum(), x, retain_graph=True)
    scaled.sum().backward()
    assert found == [False, True]
