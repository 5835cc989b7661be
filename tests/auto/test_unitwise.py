"""The unitwise reduction without a learning rate."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import quasidiag as qd


@pytest.mark.parametrize("seed", [0, 3])
def test_inputs_that_hardly_vary_do_not_spoil_it(seed: int) -> None:
    """Without bounds the blocks are nearly singular: steps spiked, and eigenvalues were not found."""
    x, t = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    optimizer = qd.Riemannian(model, criterion := qd.Categorical(), reduction="unitwise")
    losses = []
    for _ in range(150):
        chosen = torch.randint(len(x), (100,))
        optimizer.zero_grad()
        loss = criterion(model(x[chosen]), t[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) < 1.5 * losses[0] and sum(losses[-10:]) / 10 < 0.05
