"""Dense layers whose weight is stored inputs first. Oracle: ``nn.Linear``, float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd


class Conv1D(nn.Module):
    """As Hugging Face's GPT-2 has it."""

    def __init__(self, units: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(inputs, units)),
            nn.Parameter(torch.empty(units)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


def stored(layer: nn.Linear, kind: Any) -> nn.Module:
    other = kind(layer.out_features, layer.in_features).double()
    with torch.no_grad():
        other.weight.copy_(layer.weight.T)
        other.bias.copy_(layer.bias)
    return other


def pair(kind: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6).double(), nn.Linear(6, 3).double()]
    one = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    return one, nn.Sequential(stored(layers[0], kind), nn.Tanh(), stored(layers[1], kind))


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
@pytest.mark.parametrize("lr", [None, 0.05])
def test_it_is_a_dense_layer(lr: float | None, reduction: str) -> None:
    models = pair(Conv1D)
    x, t = torch.randn(30, 5, 4, dtype=torch.float64) + 1, torch.randint(3, (30, 5))
    for model in models:
        loss = qd.Categorical()
        # The safeguards depend on where moments are measured from: here zero, in nn.Linear the mean input.
        options: dict[str, Any] = dict(reduction=reduction, metric="exact", safeguard=None)
        optimizer = qd.Riemannian(model, loss, lr=lr, **options)
        assert not optimizer._others
        for _ in range(12):
            optimizer.zero_grad()
            loss(model(x), t).backward()
            optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.T if q.dim() == 2 else q, p, rtol=1e-7, atol=1e-9)


def test_the_real_one() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils")
    model, loss = pair(utils.Conv1D)[1], qd.Categorical()
    assert not qd.Riemannian(model, loss)._others
