"""The derivatives of the outputs: forward mode, plain kernels, differences; and what a run must leave alone."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto.replay import LOOK, Replay

F64 = torch.float64


class Square(torch.autograd.Function):
    """Has no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 4)).transpose(1, 3).unbind(2)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)).mean((1, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 6, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.net(x if scale is None else x * scale)


def networks() -> dict[str, tuple[nn.Module, str]]:
    torch.manual_seed(0)
    return {
        "perceptron": (mlp(4, 6, 3), "fast"),
        "convolution": (
            nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten()),
            "fast",
        ),
        "batch norm": (nn.Sequential(mlp(4, 6), nn.BatchNorm1d(6), nn.Tanh(), mlp(6, 3)), "fast"),
        "dropout": (nn.Sequential(mlp(4, 6), nn.Dropout(0.5), nn.Tanh(), mlp(6, 3)), "fast"),
        "attention": (nn.Sequential(nn.Unflatten(1, (1, 4)), Attention()), "plain"),
        "recurrent": (nn.Sequential(nn.Unflatten(1, (1, 4)), Recurrent()), "fast"),
        "custom function": (nn.Sequential(mlp(4, 6), Custom(), mlp(6, 3)), "differences"),
    }


def replayed(model: nn.Module, x: Tensor, t: Tensor, **kwargs: Any) -> Replay:
    loss = qd.Categorical()
    replay = Replay(model, loss, [*model.parameters()])
    loss(model(x, **kwargs), t).backward()
    replay.check()
    return replay


def directions(model: nn.Module) -> list[dict[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {p: torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()}
        for _ in range(2)
    ]


@pytest.mark.parametrize("name", list(networks()))
def test_tangents_are_those_of_torch_func(name: str) -> None:
    model, mode = networks()[name]
    model = model.double()
    x, t = batch("categorical", 12, 4, 3)
    replay = replayed(model, x, t)
    along = directions(model)
    random = torch.get_rng_state()
    output, target, moved = replay.tangents(replay.weighted()[0][1], along, 1.0)
    assert torch.equal(torch.get_rng_state(), random)
    assert replay.rerun.mode == mode
    assert torch.equal(target, t)
    names = {p: n for n, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    primals = {n: p.detach() for p, n in names.items()}

    def run(parameters: dict[str, Tensor]) -> Tensor:
        with replay._used[0].call.around.again(), torch.no_grad():
            given = {**parameters, **{n: b.clone() for n, b in buffers.items()}}
            return functional_call(model, given, (x,))

    torch.testing.assert_close(output, run(primals))
    for u, tangent in zip(along, moved):
        if mode == "fast":
            expected = jvp(run, (primals,), ({names[p]: v for p, v in u.items()},))[1]
            torch.testing.assert_close(tangent, expected)
        else:
            h = 1e-5
            ahead, behind = (
                run({n: p + s * h * u[q] for (n, p), q in zip(primals.items(), names)})
                for s in (1, -1)
            )
            torch.testing.assert_close(tangent, (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-7)


def test_decompositions_are_loaded_only_for_a_model_that_needs_them() -> None:
    """Because that takes long: so in a process of its own."""
    code = """if True:
        import sys, torch, quasidiag as qd
        from torch import nn

        class Force(nn.Module):
            def forward(self, y):
                with torch.enable_grad():
                    y = y.requires_grad_()
                    return torch.autograd.grad(y.softmax(1).square().sum(), y, create_graph=True)[0]

        for layers in ([], [Force(), nn.Linear(2, 2)]):
            model, loss = nn.Sequential(nn.Linear(3, 2), *layers), qd.Gaussian()
            optimizer = qd.Riemannian(model, loss)
            loss(model(torch.randn(9, 3)), torch.zeros(9, 2)).backward()
            optimizer.step()
            print(optimizer._model.replay.rerun.mode)
            print("torch._decomp.decompositions_for_jvp" in sys.modules)
    """
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["fast", "False", "decomposed", "True"]


@pytest.mark.parametrize("name", ["attention", "recurrent"])
def test_fused_kernels_without_forward_mode_give_way_to_plain_ones(name: str) -> None:
    """An LSTM's are of float32 only."""
    model = networks()[name][0]
    x, t = batch("categorical", 12, 4, 3)
    replay = replayed(model, x.float(), t)
    output, _, moved = replay.tangents(replay.weighted()[0][1], directions(model), 1.0)
    assert replay.rerun.mode == "plain"
    exact_model = copy.deepcopy(model).double()
    exact = replayed(exact_model, x, t)
    along = [
        {q: u[p].double() for p, q in zip(model.parameters(), exact_model.parameters())}
        for u in directions(model)
    ]
    expected = exact.tangents(exact.weighted()[0][1], along, 1.0)
    torch.testing.assert_close(output.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([u.double() for u in moved], expected[2], rtol=1e-4, atol=1e-4)


def test_differences_equal_forward_mode() -> None:
    model = mlp(4, 6, 3)
    x, t = batch("categorical", 12, 4, 3)
    replay = replayed(model, x, t)
    entry = replay.weighted()[0][1]
    exact = replay.tangents(entry, directions(model), 1.0)
    replay.rerun.mode = "differences"
    rough = replay.tangents(entry, directions(model), 1.0)
    torch.testing.assert_close(rough[0], exact[0])
    torch.testing.assert_close(rough[2], exact[2], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", list(networks()))
def test_every_network_trains(name: str) -> None:
    model, loss = networks()[name][0].double(), qd.Categorical()
    x, t = batch("categorical", 48, 4, 3)
    optimizer = qd.Riemannian(model, loss)
    values = []
    for _ in range(15):
        optimizer.zero_grad()
        value = loss(model(x), t)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert min(values[-3:]) < 0.95 * values[0]


def test_a_share_is_of_samples_at_even_distances() -> None:
    model = TwoInputs()
    x, t = batch("categorical", 12, 4, 3)
    scale = torch.rand(12, 1, dtype=F64)
    replay = replayed(model, x, t, scale=scale)
    entry = replay.weighted()[0][1]
    whole = replay.tangents(entry, directions(model), 1.0)
    output, target, moved = replay.tangents(entry, directions(model), 0.3)
    assert torch.equal(target, t[::3])
    torch.testing.assert_close(output, whole[0][::3])
    torch.testing.assert_close(moved, [u[::3] for u in whole[2]])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_step_leaves_buffers_and_random_state_alone(share: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(mlp(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), mlp(6, 3))
    model.double()
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss, step_fraction=share)
    x, t = batch("categorical", 24, 4, 3)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        buffers = copy.deepcopy(dict(model.named_buffers()))
        random = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), random)
        assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())


def test_a_module_at_two_places_stays_as_it_is() -> None:
    """It has its parameters and buffers once, however often it is called."""
    torch.manual_seed(0)
    shared, norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(4, 6), shared, norm, nn.Tanh(), shared, norm, nn.Linear(6, 3))
    model.double()
    loss, places = qd.Categorical(), dict(model.named_parameters())
    optimizer = qd.Riemannian(model, loss)
    x, t = batch("categorical", 200, 4, 3)
    for _ in range(8):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
        optimizer.step()
        assert all(p is places[name] for name, p in model.named_parameters())
        for name, b in model.named_buffers():
            assert b is buffers[name][0] and torch.equal(b, buffers[name][1])


@pytest.mark.parametrize("known", [True, False])
def test_a_device_without_memory_is_not_a_model_that_cannot_be_divided(known: bool) -> None:
    model = mlp(4, 6, 3)
    x, t = batch("categorical", 24, 4, 3)
    replay = replayed(model, x, t)
    entry = replay.weighted()[0][1]
    if known:
        replay.values(entry, {}, 0.5)
        assert replay.division.divisible

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    handle = model.register_forward_pre_hook(full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        replay.values(entry, {}, 0.5)
    handle.remove()
    assert model.training and replay.division.divisible is (True if known else None)


def test_a_copy_that_was_judged_may_be_written_to_before_the_step() -> None:
    """Probabilities made in place, say: what counts is the model's own output, which is watched."""
    found = []
    for spoilt in (False, True):
        model, criterion = mlp(4, 6, 3), qd.Categorical()
        optimizer = qd.Riemannian(model, criterion)
        for seed in range(8):
            x, t = batch("categorical", 24, 4, 3, seed=seed)
            optimizer.zero_grad()
            y = model(x).clone()
            criterion(y, t).backward()
            if spoilt:
                y.detach().mul_(5.0)
            optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_same_dropout_masks_are_drawn_again() -> None:
    """So that the actual decrease is the loss's, not that of another mask."""
    torch.manual_seed(0)
    model = nn.Sequential(mlp(4, 6), nn.Dropout(0.5), nn.Tanh(), mlp(6, 3))
    x, t = batch("categorical", 24, 4, 3)
    criterion = qd.Categorical()
    replay = Replay(model, criterion, [*model.parameters()])
    loss = criterion(model(x), t)
    loss.backward()
    entry = replay.weighted()[0][1]
    now, again = replay.values(entry, {})
    torch.testing.assert_close((now, again), (loss.detach().double(), loss.detach().double()))


DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.randn()),  # noqa: NPY002 - the old one, with a store of its own
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_so_is_what_other_generators_gave(kind: str) -> None:
    """Layers that are left out by chance, say; and those generators go on from where they were."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drawn = mlp(4, 6, 3), list[float]()

        def forward(self, x: Tensor) -> Tensor:
            self.drawn.append(DRAWS[kind]())
            return self.inner(x) * self.drawn[-1]

    model, criterion = Scaled(), qd.Categorical()
    x, t = batch("categorical", 24, 4, 3)
    replay = Replay(model, criterion, [*model.parameters()])
    for _ in range(3):
        loss = criterion(model(x), t)
        loss.backward()
        model.drawn, entry = model.drawn[-1:], replay.weighted()[0][1]
        replay.values(entry, {}, 0.5)
        replay.tangents(entry, directions(model), 0.5)
        assert len(model.drawn) > 3 and len({*model.drawn}) == 1
        assert DRAWS[kind]() != model.drawn[0]
        replay.clear()


@pytest.mark.parametrize("retreat", [False, True])
def test_a_model_that_begins_to_draw_is_noticed(retreat: bool) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.passes = mlp(4, 6, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return self.inner(x) * (random.random() if self.passes > 3 else 1.0)

    model = Late()
    instance = Replay(model, qd.Categorical(), [*model.parameters()])
    x, _ = batch("categorical", 24, 4, 3)
    for _ in range(3):
        model(x)
    assert not instance._foreign
    passes = LOOK
    if retreat:  # it is looked at once more where a step did harm
        instance.look_again()
        passes = 1
    for _ in range(passes):
        model(x)
    assert instance._foreign


def test_the_loss_as_it_was_is_found_once() -> None:
    class Counted(qd.Categorical):
        calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(output, target)

    model, criterion = mlp(4, 6, 3), Counted()
    x, t = batch("categorical", 24, 4, 3)
    instance = Replay(model, criterion, [*model.parameters()])
    criterion(model(x), t).backward()
    entry = instance.weighted()[0][1]
    elsewhere = {p: 2 * p.detach() for p in model.parameters()}
    for share in (1.0, 0.5):
        criterion.calls = 0
        first, second = (instance.values(entry, at, share) for at in ({}, elsewhere))
        assert criterion.calls == 3
        torch.testing.assert_close(first[0], first[1])
        assert second[0] == first[0] != second[1]


# ------------------------------------------------ What the criterion may be called on


def test_a_copy_of_less_precision_is_compared_as_the_model_has_it() -> None:
    model, criterion = mlp(4, 6, 3), qd.Categorical()
    x, t = batch("categorical", 24, 4, 3)
    instance = Replay(model, criterion, [*model.parameters()])
    criterion(model(x).float(), t).backward()
    entry = instance.weighted()[0][1]
    assert entry.output.dtype == torch.float64
    torch.testing.assert_close(*instance.values(entry, {}), rtol=1e-14, atol=0.0)


class Many(nn.Module):
    """Gives its output in various wrappings."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.net, self.wrap = mlp(4, 6, 6), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.net(x))


READINGS: dict[str, tuple[Any, Any]] = {
    "view": (lambda y: y, lambda y: y.view(-1, 3)),
    "tuple": (lambda y: (y.sum(), y), lambda y: y[1].view(-1, 3)),
    "dict": (lambda y: {"h": y.exp(), "logits": y}, lambda y: y["logits"].view(-1, 2, 3)),
    "permuted view": (lambda y: y.view(-1, 3, 2), lambda y: y.permute(0, 2, 1)),
    "permuted copy": (lambda y: y.view(-1, 3, 2), lambda y: y.permute(0, 2, 1).reshape(-1, 3)),
    "slice": (lambda y: y, lambda y: y[:, 1:4]),
    "contiguous copy": (lambda y: y.view(-1, 2, 3), lambda y: y.clone()),
    "chunks": (lambda y: y.chunk(2, dim=1), lambda y: y[1]),
}


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", list(READINGS))
def test_the_criterions_output_is_found_in_the_models(name: str, share: float) -> None:
    wrap, read = READINGS[name]
    model, loss = Many(wrap), qd.Categorical()
    x, _ = batch("categorical", 12, 4, 6)
    replay = Replay(model, loss, [*model.parameters()])
    read_off = read(model(x))
    t = torch.randint(3, read_off.shape[:-1], generator=torch.Generator().manual_seed(0))
    loss(read_off, t).backward()
    replay.check()
    entry = replay.weighted()[0][1]
    output, target, moved = replay.tangents(entry, directions(model), share)
    assert share == 1.0 or replay.division.divisible

    def rows(x: Tensor) -> Tensor:
        return x.unflatten(0, (12, -1))[:: round(1 / share)].flatten(0, 1)

    torch.testing.assert_close(output, rows(read_off).detach())
    assert torch.equal(target, rows(t))
    h, (u, _) = 1e-6, directions(model)
    with torch.no_grad():
        for p in u:
            p.add_(u[p], alpha=h)
        ahead = rows(read(model(x)))
        for p in u:
            p.add_(u[p], alpha=-2 * h)
        behind = rows(read(model(x)))
    torch.testing.assert_close(moved[0], (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("change", [lambda y: 2 * y, lambda y: y.mul_(2), lambda y: y.flip(0)])
def test_what_is_no_view_of_the_output_is_refused(change: Any) -> None:
    model, loss = mlp(4, 6, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, t = batch("categorical", 12, 4, 3)
    before = [p.clone() for p in model.parameters()]
    loss(change(model(x)), t).backward()
    with pytest.raises(RuntimeError, match="could not find the criterion's output"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("view", [False, True])
def test_an_output_that_another_kernel_lays_out_otherwise(view: bool, share: float) -> None:
    """Fused attention leaves its heads beside each other in memory, the plain kernel one after the other."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k = (f(x).view(len(x), -1, 2, 4).transpose(1, 2) for f in (self.q, self.k))
            return nn.functional.scaled_dot_product_attention(q, k, k)

    torch.manual_seed(0)
    model, loss, x = Heads().double(), qd.Gaussian(), torch.randn(12, 5, 6, dtype=F64)
    replay = Replay(model, loss, [*model.parameters()])
    y = model(x)
    assert not y.is_contiguous()
    y = y.transpose(1, 2) if view else y
    loss(y, torch.zeros_like(y)).backward()
    entry = replay.weighted()[0][1]
    given = directions(model)
    output, _, moved = replay.tangents(entry, given, share)
    assert replay.rerun.mode == "plain"
    picked = torch.arange(round(12 * share)) * 12 // round(12 * share)
    torch.testing.assert_close(output, y.detach()[picked])
    replay.rerun.mode = "differences"
    _, _, expected = replay.tangents(entry, given, share)
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)
