"""The contract where most people train: the promises of the other files on a CUDA device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import METRICS, assert_moved, assert_same, metric, problem, train, values
from torch import Tensor, nn

import quasidiag as qd

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FIXED = {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.01}


def there(output: str = "categorical", dtype: torch.dtype = torch.float64) -> tuple:
    """The usual problem on the device."""
    model, loss, x, t = problem(output)
    t = t if output == "categorical" else t.to(dtype)
    return model.to(DEVICE, dtype), loss.to(DEVICE), x.to(DEVICE, dtype), t.to(DEVICE)


def numbers(model: nn.Module, optimizer: qd.Riemannian) -> list[Tensor]:
    return [x.cpu() for x in values(model) + metric(optimizer)]


@pytest.mark.parametrize("output", ["categorical", "gaussian", "bernoulli"])
@pytest.mark.parametrize("kind", ["outer-product", "exact", "backpropagated"])
def test_the_same_run_as_on_the_cpu(kind: str, output: str) -> None:
    ends = []
    for model, loss, x, t in (problem(output), there(output)):
        optimizer = qd.Riemannian(model, loss, metric=kind, **FIXED)
        train(model, loss, optimizer, x, t, 4)
        ends.append(numbers(model, optimizer))
    assert_same(*ends, 1e-9)


@pytest.mark.parametrize("kind", ["outer-product", "exact"])
def test_the_same_run_in_single_precision(kind: str) -> None:
    """With the kernels that only single precision has."""
    ends = []
    for dtype in (torch.float64, torch.float32):
        model, loss, x, t = there(dtype=dtype)
        optimizer = qd.Riemannian(model, loss, metric=kind, **FIXED)
        train(model, loss, optimizer, x, t, 4)
        ends.append([p.double().cpu() for p in values(model)])
    assert_same(*ends, 1e-3)


def test_without_a_learning_rate() -> None:
    ends = []
    for model, loss, x, t in (problem(), there()):
        optimizer = qd.Riemannian(model, loss, metric="exact")
        train(model, loss, optimizer, x, t, 5)
        ends.append([p.cpu() for p in values(model)])
    assert_same(*ends, 1e-6)


@pytest.mark.parametrize("options", [{}, {"lr": 0.02}, {"lr": 0.02, "metric": "exact"}], ids=str)
def test_a_criterion_that_stayed_behind(options: dict[str, Any]) -> None:
    ends = []
    for device in (DEVICE, "cpu"):
        model, loss, x, t = there("gaussian")
        loss = loss.to(device)
        optimizer = qd.Riemannian(model, loss, **options)
        train(model, loss, optimizer, x, t, 3)
        ends.append([p.cpu() for p in values(model)])
    assert_same(*ends, 1e-9)


def test_learned_deviations() -> None:
    model, _, x, t = there("gaussian")
    loss = qd.LearnedGaussian(3).double().to(DEVICE)
    before = loss.log_std.detach().clone()
    train(model, loss, qd.QDMCNat(model, loss, lr=0.02), x, t, 3)
    assert not torch.equal(before, loss.log_std)


# ------------------------------------------------ Mixed precision


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", METRICS)
def test_autocast_with_a_gradient_scaler(kind: str, half: torch.dtype) -> None:
    """The metric is that of full precision, in float32; the scale leaves no trace in it."""
    ends = []
    for enabled in (False, True):
        model, loss, x, t = there(dtype=torch.float32)
        optimizer = qd.Riemannian(model, loss, lr=0.01, metric=kind, samples=50)
        scaler = torch.amp.GradScaler(DEVICE, enabled=enabled)
        before = values(model)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=half, enabled=enabled):
                value = loss(model(x), t)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        assert_moved(before, model)
        ends.append(metric(optimizer))
    assert {m.dtype for m in ends[1]} == {torch.float32}
    tolerance = 0.25 if half == torch.bfloat16 or kind == "monte-carlo" else 0.05
    for one, other in zip(*ends, strict=True):
        assert float((one - other).norm() / one.norm()) < tolerance


def test_a_step_skipped_by_the_scaler() -> None:
    model, loss, x, t = there(dtype=torch.float32)
    optimizer = qd.QDOP(model, loss, lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    train(model, loss, optimizer, x, t)
    before = numbers(model, optimizer)
    optimizer.zero_grad()
    scaler.scale(loss(model(x), t)).backward()
    model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert_same(before, numbers(model, optimizer), 0.0)


# ------------------------------------------------ CUDA graphs


@pytest.mark.parametrize("kind", ["outer-product", "exact", "monte-carlo"])
def test_a_captured_step(kind: str) -> None:
    """Replayed on other minibatches, at other rates, it is the step that would have been taken."""
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(8, 24, 4, generator=generator).to(DEVICE)
    rates = [0.02, 0.01, 0.03, 0.02]
    ends = []
    for captured in (False, True):
        model, loss, x, t = there(dtype=torch.float32)
        lr = torch.tensor(0.02, device=DEVICE)
        optimizer = qd.Riemannian(model, loss, lr=lr, metric=kind, momentum=0.5, capturable=True)

        def step(model=model, loss=loss, x=x, t=t, optimizer=optimizer) -> None:
            optimizer.zero_grad()
            loss(model(x), t).backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for batch in data[:3]:
                x.copy_(batch)
                step()
        torch.cuda.current_stream().wait_stream(side)
        run = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            if optimizer.generator is not None:
                graph.register_generator_state(optimizer.generator)
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        before = values(model)
        for batch, rate in zip(data[3:], rates):
            x.copy_(batch)
            lr.fill_(rate)
            run()
        assert_moved(before, model)
        ends.append(numbers(model, optimizer))
    if kind == "monte-carlo":  # whose draws are others
        assert all(bool(number.isfinite().all()) for number in ends[1])
    else:
        assert_same(*ends, 1e-4)


# ------------------------------------------------ At rest


def test_an_average_is_left_between_the_steps() -> None:
    """Of the places of the same run without one."""
    ends = []
    for averaged in (True, False):
        model, loss, x, t = there()
        optimizer = qd.Riemannian(model, loss, lr=0.1, step="auto", averaged=averaged)
        train(model, loss, optimizer, x, t, 40)
        model(x)  # moves ahead
        ends.append(values(model))
        if averaged:
            apart = [optimizer.state[p]["apart"] for p in model.parameters()]
            assert all(e.device.type == DEVICE and e.any() for e in apart)
    assert_same(*ends, 1e-6)


# ------------------------------------------------ Many tensors at once


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal"])
def test_foreach_equals_the_loop(reduction: str, dtype: torch.dtype) -> None:
    ends = []
    for foreach in (False, True, None):
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())]
        model, loss = nn.Sequential(*layers).to(DEVICE, dtype), qd.Categorical()
        options: dict[str, Any] = FIXED | {"foreach": foreach, "reduction": reduction}
        optimizer = qd.Riemannian(model, loss, **options)
        x = torch.randn(16, 4, device=DEVICE, dtype=dtype)
        # In single precision, rounding has grown to 5e-3 after four steps.
        train(model, loss, optimizer, x, torch.arange(16, device=DEVICE) % 4, 2)
        ends.append(numbers(model, optimizer))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    assert_same(ends[0], ends[1], tolerance)
    assert_same(ends[0], ends[2], tolerance)


# ------------------------------------------------ NCCL


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one rank, whose collectives are NCCL's all the same."""
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.parametrize("wrap", ["ddp", "fully_shard"])
@pytest.mark.parametrize("kind", METRICS[:3])
def test_over_nccl(kind: str, wrap: str, group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    ends = []
    for wrapped in (False, True):
        model, loss, x, t = there()
        network: Any = model
        if wrapped and wrap == "ddp":
            network = nn.parallel.DistributedDataParallel(model)
        elif wrapped:
            for layer in (model[0], model[2]):
                fully_shard(layer)
            network = fully_shard(model)
        options: dict[str, Any] = FIXED | {"process_group": "auto" if wrapped else None}
        optimizer = qd.Riemannian(network, loss, metric=kind, **options)
        train(network, loss, optimizer, x, t, 4)
        found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in values(model)]
        ends.append([p.cpu() for p in found])
        optimizer.close()
    if kind != "monte-carlo":  # where rank and step say what is drawn
        assert_same(*ends, 1e-9)
    assert all(bool(p.isfinite().all()) for p in ends[1])
