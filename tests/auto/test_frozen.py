"""Parameters that are frozen once the optimizer is there: the rest of their layer trains on."""

from __future__ import annotations

import pytest
import torch
from handwritten import digits, network, train

import quasidiag as qd


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "diagonal"}, {"reduction": "unitwise"}, {"orthogonal": False}],
    ids=lambda options: next(map(str, options.values()), "default"),
)
def test_biases_frozen_before_the_first_step(options: dict[str, object]) -> None:
    """Inputs that hardly vary, such as pixels at the border, do not take steps that spoil all others'."""
    model = network()
    optimizer = qd.Riemannian(model, qd.Categorical(), **options)  # type: ignore[arg-type]
    biases = [p for p in model.parameters() if p.dim() == 1]
    for bias in biases:
        bias.requires_grad_(False)
    before = [bias.clone() for bias in biases]
    assert train(optimizer, *digits(), 100)[-1] < 0.5
    assert all(map(torch.equal, biases, before))
