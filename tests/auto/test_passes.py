"""Which backward passes a step is about, and what their losses were multiplied by."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quasidiag as qd
from nets import batch, mlp
from quasidiag.auto.witness import Witness


def problem(
    **options: Any,
) -> tuple[nn.Sequential, qd.OutputModel, qd.Riemannian, Tensor, Tensor]:
    model, loss = mlp(4, 6, 3), qd.Categorical()
    return model, loss, qd.Riemannian(model, loss, **options), *batch("categorical", 40, 4, 3)


def used(optimizer: qd.Riemannian) -> int:
    assert optimizer._model is not None
    return len(optimizer._model.replay._used)


def same(ends: list[list[Tensor]]) -> None:
    for other in ends[1:]:
        torch.testing.assert_close(ends[0], other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_derivatives_of_the_input_are_no_part_of_the_step(in_place: bool) -> None:
    """Adversarial examples by one step: in most steps the metric is not due, and the first pass must not count either."""
    model, loss, optimizer, x, t = problem()
    for _ in range(12):
        optimizer.zero_grad()
        inputs = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(model(inputs), t), inputs)
        if in_place:
            with torch.no_grad():
                inputs += 0.1 * g.sign()
        else:
            inputs = inputs + 0.1 * g.sign()
        loss(model(inputs.detach()), t).backward()
        assert used(optimizer) == 1
        optimizer.step()


def attacked(how: str, set_to_none: bool, **options: Any) -> list[Tensor]:
    """Where training comes to with derivatives of the input taken by the way, which nobody uses."""
    model, loss, optimizer, x, t = problem(**options)
    for _ in range(10):
        optimizer.zero_grad(set_to_none)
        inputs = x.clone().requires_grad_()
        value = loss(model(inputs), t)
        if how == "same graph":
            torch.autograd.grad(value, inputs, retain_graph=True)
        elif how == "create_graph":
            torch.autograd.grad(value, inputs, create_graph=True)
        elif how == "another graph":
            torch.autograd.grad(loss(model(inputs), t), inputs)
        elif how == "into the input":
            value.backward(inputs=[inputs], retain_graph=True)
        elif how == "checkpoint":
            inner = checkpoint(model, inputs, use_reentrant=False)
            torch.autograd.grad(loss(inner, t), inputs)
        value.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, *({"lr": 0.05, "metric": metric} for metric in ("outer-product", "monte-carlo", "exact"))],
    ids=["auto", "outer-product", "monte-carlo", "exact"],
)
def test_a_pass_that_leads_to_no_parameter_is_none(
    options: dict[str, Any], set_to_none: bool
) -> None:
    plain = attacked("not at all", set_to_none, **options)
    for how in ("same graph", "create_graph", "another graph", "into the input", "checkpoint"):
        for one, other in zip(attacked(how, set_to_none, **options), plain, strict=True):
            assert torch.equal(one, other), how


def test_a_penalty_on_the_gradient_of_the_input() -> None:
    """The first pass is none; the second has the loss in it, and more."""
    model, loss, optimizer, x, t = problem()
    for _ in range(10):
        optimizer.zero_grad()
        inputs = x.clone().requires_grad_()
        value = loss(model(inputs), t)
        (g,) = torch.autograd.grad(value, inputs, create_graph=True)
        (value + g.square().sum()).backward()
        assert used(optimizer) == 1
        optimizer.step()
    assert float(loss(model(x), t).detach()) < 1.0


def test_gradients_that_somebody_puts_there_himself() -> None:
    """They are asked for, and accumulate nowhere."""
    ends: list[list[Tensor]] = []
    for manual in (False, True):
        model, loss, optimizer, x, t = problem()
        for _ in range(10):
            optimizer.zero_grad()
            value = loss(model(x), t)
            if manual:
                parameters = [*model.parameters()]
                for p, g in zip(parameters, torch.autograd.grad(value, parameters)):
                    p.grad = g
            else:
                value.backward()
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    same(ends)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_through_checkpoints_alone(reentrant: bool) -> None:
    """The graph of the loss need not have a parameter in it: a second one, inside the pass, may."""
    model, loss, x, t = mlp(4, 6, 3), qd.Categorical(), *batch("categorical", 40, 4, 3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    net = Net()
    optimizer = qd.Riemannian(net, loss, lr=0.05, metric="outer-product")
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        loss(net(x.clone().requires_grad_()), t).backward()
        assert optimizer._collector.passes == 1
        optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_what_other_parts_of_a_loop_backpropagated_is_gone_with_its_gradients() -> None:
    """A discriminator sees the generator's pass too; it is the model's ``zero_grad`` that takes the gradients away."""
    model, loss, optimizer, x, t = problem()
    for _ in range(12):
        loss(model(x + 1.0), t).backward()
        model.zero_grad()
        loss(model(x), t).backward()
        (0.5 * loss(model(x), t)).backward()
        assert used(optimizer) == 2
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_that_waits_keeps_one_minibatch() -> None:
    model, loss, optimizer, x, t = problem()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        other.zero_grad()
        loss(model(x), t).backward()
        other.step()
    assert used(optimizer) == 1


def test_a_loss_that_is_backpropagated_once_more_counts_once() -> None:
    model, loss, optimizer, x, t = problem()
    for k in range(12):
        optimizer.zero_grad()
        value = loss(model(x), t)
        torch.autograd.grad(value, [*model.parameters()], retain_graph=True)
        value.backward()
        assert used(optimizer) == 1 and k == optimizer.steps
        optimizer.step()


def train(
    scale: float | None = None,
    by: float = 1.0,
    clip: float | None = None,
    pieces: int = 1,
    zero: bool = False,
) -> list[Tensor]:
    model, loss, optimizer, x, t = problem()
    if zero:  # at first nothing but the last layer has a gradient
        nn.init.zeros_(model[-1].weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for _ in range(12):
        optimizer.zero_grad()
        for xs, ts in zip(x.chunk(pieces), t.chunk(pieces)):
            scaler.scale(by * loss(model(xs), ts) / pieces).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("scale", [2.0, 16.0, 1000.0, 2.0**16])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_scaler_changes_nothing(scale: float, pieces: int) -> None:
    same([train(pieces=pieces), train(scale, pieces=pieces)])


@pytest.mark.parametrize("scale", [16.0, 2.0**16])
def test_nor_with_clipped_gradients(scale: float) -> None:
    same([train(clip=0.05), train(scale, clip=0.05)])


@pytest.mark.parametrize("by", [0.25, 3.0, 32.0, 256.0])
def test_nor_does_a_loss_that_is_multiplied(by: float) -> None:
    """By the number of samples, say. The step is the same for any unit of the loss."""
    same([train(), train(by=by), train(1024.0, by=by)])


def test_a_scaler_is_noticed_by_gradients_that_are_not_zero() -> None:
    same([train(zero=True), train(2.0**16, zero=True)])


@pytest.mark.parametrize("clip", [0.5, 5.0])
@pytest.mark.parametrize("scale", [None, 2.0**16])
def test_a_loss_that_is_multiplied_and_clipped_goes_down(scale: float | None, clip: float) -> None:
    """What it was divided by is not known exactly then, but nearly; and clipped gradients shorten the step."""
    model, loss, _, x, t = problem()
    first = float(loss(model(x), t).detach())
    for p, w in zip(model.parameters(), train(scale, by=500.0, clip=clip)):
        p.data = w
    assert float(loss(model(x), t).detach()) < 0.95 * first


@pytest.mark.parametrize(
    ("shrunk", "total", "scale"),
    [
        (1.0, 500.0, 1.0),
        (20.0, 500.0, 1.0),
        (100.0, 500.0, 64.0),
        (65536.0, 65536.0, 65536.0),
        (1000.0, 1000.0, 1000.0),
        (65536.0 * 1.5, 65536.0, 65536.0),
        (65536.0 * 1.5, 65536.0 * 500, 65536.0),
        (65536.0 * 100, 65536.0, 65536.0),
    ],
)
def test_what_gradients_were_divided_by(shrunk: float, total: float, scale: float) -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([1.0, -shrunk, 0.5])
    witness = Witness()
    witness.see([p], [torch.tensor(total)])
    p.grad /= shrunk
    assert witness.scale(total) == scale


def test_a_scaler_of_one_optimizer_of_two() -> None:
    """It divides the gradients of the one that it steps."""
    ends: list[list[Tensor]] = []
    for scale in (1.0, 64.0):
        torch.manual_seed(0)
        body, head, loss = nn.Linear(4, 6), nn.Linear(6, 3), qd.Categorical()
        model = nn.Sequential(body, nn.Tanh(), head).double()
        x, t = batch("categorical", 40, 4, 3)
        ours: Any = qd.Riemannian(model, loss, params=[*body.parameters()])
        theirs = torch.optim.SGD(head.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(8):
            ours.zero_grad()
            theirs.zero_grad()
            scaler.scale(loss(model(x), t)).backward()
            scaler.step(ours)
            scaler.step(theirs)
            scaler.update()
        ends.append([p.detach() for p in model.parameters()])
    same(ends)


@pytest.mark.parametrize("cut", [slice(None, -1), slice(1, None), slice(None, 3)])
@pytest.mark.parametrize("flat", [False, True])
def test_a_copied_slice_of_a_sequence_is_known(cut: slice, flat: bool) -> None:
    """As most write it where the next word is to be told: ``logits[:, :-1].contiguous().view(-1, words)``."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)).double(), qd.Categorical()
    x, ends = torch.randint(9, (40, 7)), []
    for copies in (False, True):
        twin = copy.deepcopy(model)
        optimizer = qd.Riemannian(twin, loss)
        for _ in range(3):
            optimizer.zero_grad()
            y, t = twin(x)[:, cut], x.roll(1, 1)[:, cut]
            y = y.contiguous() if copies else y
            y, t = (y.reshape(-1, 9), t.reshape(-1)) if flat and copies else (y, t)
            loss(y, t).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in twin.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)
