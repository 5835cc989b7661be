"""Handwritten digits, 8×8, whose pixels at the border hardly vary: what tests on real data have in common."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import quasidiag as qd


def digits() -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1] and labels."""
    x, t = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return x.float() / 16, t


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))


def train(optimizer: qd.Riemannian, x: Tensor, t: Tensor, steps: int, seed: int = 1) -> list[float]:
    """The loss of each step, on minibatches of 100."""
    assert optimizer.criterion is not None
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        chosen = torch.randint(len(x), (100,), generator=generator)
        optimizer.zero_grad()
        loss = optimizer.criterion(optimizer.model(x[chosen]), t[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
