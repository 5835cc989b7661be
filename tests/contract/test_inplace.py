"""In-place activations, in any order, with the metric of those that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loops import METRICS, assert_same, metric, problem, train, values
from torch import Tensor, nn

import quasidiag as qd


class Residual(nn.Module):
    """Adds in place, and scales its input in place before the layer sees it."""

    def __init__(self, layer: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.layer, self.inplace = layer, inplace

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z.mul_(0.5).add_(1.0) if self.inplace else z * 0.5 + 1.0


NETS: dict[str, Callable[[list[nn.Module], bool], nn.Module]] = {
    "relu": lambda layers, inplace: nn.Sequential(layers[0], nn.ReLU(inplace), layers[1]),
    "leaky": lambda layers, inplace: nn.Sequential(
        layers[0], nn.LeakyReLU(0.1, inplace), layers[1]
    ),
    "arithmetic": lambda layers, inplace: nn.Sequential(Residual(layers[0], inplace), layers[1]),
    "twice": lambda layers, inplace: nn.Sequential(
        Residual(layers[0], inplace), nn.ReLU(inplace), layers[1]
    ),
    "last": lambda layers, inplace: nn.Sequential(
        layers[0], nn.Sigmoid(), Residual(layers[1], inplace)
    ),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", METRICS)
def test_in_place_is_the_same(kind: str, name: str) -> None:
    ends = []
    for inplace in (False, True):
        plain, loss, x, t = problem()
        model = NETS[name]([plain[0], plain[2]], inplace)
        optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind, seed=1)
        train(model, loss, optimizer, x.clone(), t, 3)
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends)


def test_input_changed_after_the_layer_saw_it_is_an_error_of_autograd_and_not_a_wrong_metric() -> (
    None
):
    plain, loss, x, t = problem()
    model = plain[:1]
    optimizer = qd.QDOP(model, loss, lr=0.05)
    output = model(x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss(output, t).backward()
    optimizer.zero_grad()
    train(model, loss, optimizer, x, t)
    assert torch.isfinite(model[0].weight).all()
