"""Memory: what the state holds, and what training takes at its peak beside AdamW."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loops import METRICS, problem, train
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import quasidiag as qd

#: Numbers that the allocator counts in; a handful of scalars and vectors come on top of what the test counts.
SLACK = 64 * 1024


def state_numbers(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel()
        for kept in optimizer.state.values()
        for value in kept.values()
        if isinstance(value, Tensor)
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", METRICS)
def test_state_is_two_numbers_a_parameter_and_three_with_momentum(
    kind: str, momentum: float
) -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, momentum=momentum)
    train(model, loss, optimizer, x, t, 2)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    biases = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    inputs = sum(layer.in_features for layer in model if isinstance(layer, nn.Linear))
    buffers = weights + biases if momentum else 0
    # m0i and mii for each weight, m00 for each bias, and one shift for each input of a layer.
    assert state_numbers(optimizer) == 2 * weights + biases + inputs + buffers
    assert state_numbers(optimizer) <= (3 if momentum else 2) * (weights + biases) + inputs


def test_diagonal_state_is_one_number_a_parameter() -> None:
    model, loss, x, t = problem()
    optimizer = qd.DOP(model, loss, lr=0.05)
    train(model, loss, optimizer, x, t)
    assert state_numbers(optimizer) == sum(p.numel() for p in model.parameters())


def peak(work: Callable[[], None]) -> int:
    """The most bytes that ``work`` had allocated at once, beyond what there was before; told by the allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in record.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most


class Classifier(nn.Sequential):
    def __init__(self, width: int, depth: int) -> None:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(width, 10))


def activations(model: nn.Module, x: Tensor, t: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = nn.functional.cross_entropy(model(x), t)
    del loss
    return sum(kept.values())


def training_peak(
    make: Callable[[nn.Module, nn.Module], torch.optim.Optimizer],
    width: int,
    depth: int,
    batch: int,
    parts: int = 1,
) -> tuple[int, int]:
    """Bytes at the peak of the third training step, and the activations of a micro-batch."""
    torch.manual_seed(0)
    model, loss = Classifier(width, depth), qd.Categorical()
    x, t = torch.randn(batch, width), torch.randint(10, (batch,))
    optimizer = make(model, loss)

    def step() -> None:
        optimizer.zero_grad()
        for part, target in zip(x.chunk(parts), t.chunk(parts), strict=True):
            (loss(model(part), target) / parts).backward()
        optimizer.step()

    step()
    step()
    optimizer.zero_grad()
    n = batch // parts
    return peak(step), activations(model, x[:n], t[:n])


def adamw(model: nn.Module, loss: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("width", "depth", "batch"),
    [(256, 3, 32), (128, 4, 512), (64, 8, 1024), (64, 2, 2048), (128, 1, 512)],
)
@pytest.mark.parametrize("kind", METRICS)
def test_peak_exceeds_adamw_s_by_the_activations_at_most(
    kind: str, width: int, depth: int, batch: int
) -> None:
    """Few samples: weights rule the peak. Many samples: activities do, and in shallow networks the outputs."""
    theirs, allowance = training_peak(adamw, width, depth, batch)
    ours, _ = training_peak(
        lambda model, loss: qd.Riemannian(model, loss, lr=1e-3, metric=kind, momentum=0.9),
        width,
        depth,
        batch,
    )
    assert ours <= theirs + allowance + SLACK, (ours, theirs, allowance)


@pytest.mark.parametrize("kind", ["outer-product", "exact"])
def test_micro_batches_save_memory(kind: str) -> None:
    """Eight of them take what one takes, and the sums of their moments: two numbers a parameter."""

    def make(model: nn.Module, loss: nn.Module) -> torch.optim.Optimizer:
        return qd.Riemannian(model, loss, lr=1e-3, metric=kind)

    one, _ = training_peak(make, 64, 4, 256)
    eight, activities = training_peak(make, 64, 4, 8 * 256, parts=8)
    parameters = sum(p.numel() for p in Classifier(64, 4).parameters())
    assert eight <= one + activities + 4 * 3 * parameters + SLACK
    whole, _ = training_peak(make, 64, 4, 8 * 256)
    assert eight < whole / 2
