"""Brute force for layers: the gradient of every sample, or of every occurrence, one autograd call each.

Nothing here knows of adapters: a layer is called as torch has it, and a unit is told by ``unit_of``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import quasidiag as qd
from quasidiag.moments import Moments

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
METRICS = ("outer-product", "monte-carlo", "exact")


class Net(nn.Module):
    """A layer, an activation in place, and a dense head on all there is of each sample."""

    def __init__(self, layer: nn.Module, outputs: int, classes: int = 3) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(outputs, classes)

    def forward(self, *inputs: Tensor) -> Tensor:
        z = self.layer(*inputs)
        return self.head(z.tanh_().flatten(1))


class Draws:
    """Remembers the targets that a criterion draws, to hand the very same ones to the brute force."""

    def __init__(self, criterion: qd.OutputModel) -> None:
        self.drawn: list[Tensor] = []
        plain = criterion.sample

        def sample(output: Tensor, generator: torch.Generator | None = None) -> Tensor:
            self.drawn.append(plain(output, generator))
            return self.drawn[-1]

        criterion.sample = sample  # type: ignore[method-assign]


def vectors(
    metric: str, criterion: qd.OutputModel, y: Tensor, t: Tensor, drawn: list[Tensor]
) -> list[Tensor]:
    """The vectors at the output, from the definition of each metric."""
    y = y.detach()
    if metric == "outer-product":
        return [criterion.residual(y, t)]
    if metric == "monte-carlo":
        return [criterion.residual(y, draw) / len(drawn) ** 0.5 for draw in drawn]
    return list(criterion.vectors(y))


def unit_of(module: nn.Module, weight: Tensor) -> Tensor:
    """For every entry of the weight, which unit it belongs to."""
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        found = torch.empty(weight.shape, dtype=torch.long)
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                group = i // (weight.shape[0] // module.groups)
                found[i, j] = group * weight.shape[1] + j
        return found
    if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._NormBase):
        return torch.arange(weight.numel()).view(weight.shape)
    rows = torch.arange(weight.shape[0])
    return rows.view(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)


def sample_gradients(
    y: Tensor, vectors: list[Tensor], parameters: list[Tensor]
) -> list[list[Tensor]]:
    """For every sample and vector the gradient of ⟨u_n, y_n⟩."""
    return [
        list(torch.autograd.grad((y[n] * u[n]).sum(), parameters, retain_graph=True))
        for u in vectors
        for n in range(len(y))
    ]


def occurrence_gradients(
    out: Tensor, delta: Tensor, channel: int, parameters: list[Tensor]
) -> list[list[Tensor]]:
    """The part that each position of each sample has in the gradient."""
    found = []
    places = delta.movedim(channel, -1).shape[:-1]
    for place in torch.cartesian_prod(*[torch.arange(k) for k in places]).reshape(-1, len(places)):
        only = torch.zeros_like(delta)
        only.movedim(channel, -1)[tuple(place)] = delta.movedim(channel, -1)[tuple(place)]
        found.append(list(torch.autograd.grad(out, parameters, only, retain_graph=True)))
    return found


def moments(
    gradients: list[list[Tensor]], samples: int, units: Tensor, bias: bool = True
) -> Moments:
    """Means over samples of the squares, weight first and bias second in each list."""
    mii = sum(g[0] ** 2 for g in gradients) / samples
    if not bias:
        return Moments(None, None, mii)  # type: ignore[arg-type]
    m00 = sum(g[1] ** 2 for g in gradients) / samples
    m0i = sum(g[1].flatten()[units] * g[0] for g in gradients) / samples
    return Moments(m00, m0i, mii)  # type: ignore[arg-type]


def assert_close(got: Moments, expected: Moments, reduction: str = "quasi-diagonal") -> None:
    for field in Moments._fields:
        one, other = getattr(got, field), getattr(expected, field)
        if field == "m0i" and reduction == "diagonal":
            assert one is None
        elif other is not None:
            torch.testing.assert_close(one, other, **CLOSE)


def step(
    model: nn.Module,
    inputs: Any,
    t: Tensor,
    criterion: qd.OutputModel,
    metric: str,
    forward: Callable[[], Tensor] | None = None,
    **options: Any,
) -> tuple[qd.Riemannian, list[Tensor]]:
    """One step of an optimizer that moves nothing; and the draws that it made."""
    draws = Draws(criterion)
    optimizer = qd.Riemannian(model, criterion, lr=0.0, metric=metric, **options)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    criterion(model(*inputs) if forward is None else forward(), t).backward()
    optimizer.step()
    optimizer.close()
    return optimizer, draws.drawn
