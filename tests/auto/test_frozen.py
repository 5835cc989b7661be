"""Parameters that are frozen once the optimizer is there: the rest of their layer trains on."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import quasidiag as qd

STEPS, LOSS = 100, 0.5


def digits() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "diagonal"}, {"reduction": "unitwise"}, {"orthogonal": False}],
    ids=lambda options: next(map(str, options.values()), "default"),
)
def test_biases_frozen_before_the_first_step(options: dict[str, object]) -> None:
    """Inputs that hardly vary, such as pixels at the border, do not take steps that spoil all others'."""
    x, t = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x, model, criterion = x.float() / 16, digits(), qd.Categorical()
    optimizer = qd.Riemannian(model, criterion, **options)  # type: ignore[arg-type]
    biases = [p for p in model.parameters() if p.dim() == 1]
    for bias in biases:
        bias.requires_grad_(False)
    before = [bias.clone() for bias in biases]
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (100,))
        optimizer.zero_grad()
        loss = criterion(model(x[chosen]), t[chosen])
        loss.backward()
        optimizer.step()
    assert loss < LOSS
    assert all(map(torch.equal, biases, before))
