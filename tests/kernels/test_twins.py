"""Training with the compiled kernels beside the same without: what they keep between steps is never out of date."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import linear_layers, mlp
from quasidiag.auto import moving, rest
from quasidiag.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")

Change = Callable[[qd.Riemannian], Any]


def trained(
    optimizer: qd.Riemannian, steps: int = 14, change: Change = id, at: int = 9, first: int = 0
) -> list[float]:
    """The losses; ``change`` happens before a step in which neither model nor metric are measured."""
    assert optimizer.criterion is not None
    found = []
    for step in range(first, first + steps):
        x = torch.randn(64, 20, generator=torch.Generator().manual_seed(step))
        if step == at:
            change(optimizer)
        optimizer.zero_grad()
        loss = optimizer.criterion(optimizer.model(x), x[:, :5].sin())
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def rule(**options: Any) -> qd.Riemannian:
    return qd.Riemannian(mlp(20, 30, 5, activation="tanh").float(), qd.Gaussian(), **options)


def lost(optimizer: qd.Riemannian) -> list[str]:
    """Parameters whose average has gone, at the beginning of a step."""
    named = optimizer.model.named_parameters()
    states = {name: optimizer.state.get(p, {}) for name, p in named}
    return [name for name, s in states.items() if "apart" in s and not s["apart"].any()]


def other_averages(optimizer: qd.Riemannian) -> None:
    """The old ones are not a number from now on."""
    for p in optimizer.model.parameters():
        before = optimizer.state[p]["average"]
        optimizer.state[p]["average"] = before.clone()
        before.fill_(torch.nan)


def elsewhere(optimizer: qd.Riemannian) -> None:
    """The same tensors, at other addresses."""
    for p in optimizer.model.parameters():
        average = optimizer.state[p]["average"]
        before = average.detach()
        average.data = average.clone()
        before.fill_(torch.nan)


def other_roots(optimizer: qd.Riemannian) -> None:
    for layer in linear_layers(optimizer.model):
        optimizer.state[layer.weight]["mii"].mul_(4.0)


def reloaded(optimizer: qd.Riemannian) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def strided(optimizer: qd.Riemannian) -> None:
    """A parameter that no kernel takes from now on."""
    weight = linear_layers(optimizer.model)[0].weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize(
    "change",
    [id, other_averages, elsewhere, other_roots, reloaded],
    ids=lambda f: f.__name__,
)
def test_what_is_kept_between_steps_is_what_is_there(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(rule(), change=change)
    monkeypatch.setattr(native, "dense", lambda *tensors: False)
    assert found == pytest.approx(trained(rule(), change=change), rel=1e-4)


def test_a_bias_that_was_frozen_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its average has seen fewer gradients than that of its weights."""

    def losses() -> list[float]:
        optimizer = rule()
        bias = linear_layers(optimizer.model)[0].bias
        bias.requires_grad_(False)
        first = trained(optimizer, 5)
        bias.requires_grad_(True)
        return first + trained(optimizer, 8, first=5)

    found = losses()
    monkeypatch.setattr(native, "dense", lambda *tensors: False)
    assert found == pytest.approx(losses(), rel=1e-4)


def test_optimizers_do_not_take_each_others_constants_away() -> None:
    found = []
    for crowd in (False, True):
        optimizer = rule()
        losses = trained(optimizer, 10)
        for i in range(9 if crowd else 0):
            trained(rule(safeguard=(0.01 * i, 0.1, 0.1), orthogonal=False), 3)
        found.append(losses + trained(optimizer, 5, first=10))
    assert found[0] == found[1]


class Odd(nn.Module):
    """Dense layers, and a parameter of their own kind."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.body = mlp(20, 30, 5, activation="tanh").float()
        self.gain = nn.Parameter(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.gain.mean().float()


@pytest.mark.parametrize(
    "gain",
    [torch.ones(50).double(), torch.ones(7, 5).t(), torch.ones(50)],
    ids=["float64", "transposed", "plain"],
)
def test_parameters_that_no_kernel_takes_beside_others_that_it_does(gain: Tensor) -> None:
    """Norms that two codes have found may differ by rounding, and nobody has changed anything."""
    with pytest.warns(UserWarning, match="AdaGrad"):
        optimizer = qd.Riemannian(Odd(gain), qd.Gaussian())
    for step in range(40):
        trained(optimizer, 1, first=step, at=-1)
        optimizer.model(torch.randn(3, 20))
        assert not lost(optimizer)


def test_parameters_that_overlap_keep_their_averages() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20))
    first, second = linear_layers(model)
    second.weight.data = first.weight.data
    loss = qd.Gaussian()
    optimizer = qd.Riemannian(model, loss)
    for step in range(20):
        x = torch.randn(64, 20, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        y = model(x)
        assert not lost(optimizer)
        loss(y, x.sin()).backward()
        optimizer.step()


def test_averages_of_parameters_next_to_nothing_are_kept() -> None:
    """Their squares are denormal numbers."""
    optimizer = rule()
    trained(optimizer, 12)
    parameters = [*optimizer.model.parameters()]
    with torch.no_grad():
        rest.lead_(optimizer)
        for p in parameters:
            p.mul_(1e-21)
            optimizer.state[p]["apart"].mul_(1e-21)
        moving.move_(optimizer, {p: torch.zeros_like(p) for p in parameters}, 0.0, settles=True)
        assert not any(optimizer.state[p]["ahead"] for p in parameters)
        rest.lead_(optimizer)
    assert not lost(optimizer)


def test_a_parameter_that_no_kernel_takes_any_more() -> None:
    optimizer = rule()
    trained(optimizer, 12, change=strided)
    with torch.no_grad():
        rest.lead_(optimizer)
    assert not lost(optimizer)
    strided(optimizer)
    assert torch.isfinite(torch.tensor(trained(optimizer, 5, first=12))).all()
