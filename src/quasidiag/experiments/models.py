r"""The paper's networks, with the authors' initialisation.

Weights are drawn from :math:`N(0, 1/\mathrm{fan\_in})` with zero biases, for tanh and ReLU. A sigmoid network starts
as *the same function* as the tanh network of the same seed: as :math:`\tanh u = 2\,\mathrm{sigmoid}(2u) - 1`, a weight
gets a factor 2 if a sigmoid comes after it and another 2 if one comes before it, and in the latter case the bias
:math:`-\frac12 \sum_i w_i` cancels the offset. Between hidden layers this is the authors' factor 4.
Likewise the network on inverted pixels starts as the same function of the picture.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import quasidiag as qd

from .config import Config, UsageError
from .sparse import SparseLinear

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}


def build(config: Config) -> tuple[nn.Sequential, qd.OutputModel]:
    """The network and the output model of a run; the same for the same seed, on every device."""
    if config.activation not in ACTIVATIONS:
        raise UsageError(f"activation must be one of {', '.join(ACTIVATIONS)}")
    generator = torch.Generator().manual_seed(config.seed)
    sizes = list(zip(config.layers, config.layers[1:]))
    model = nn.Sequential()
    if config.input_dropout:
        model.append(nn.Dropout(config.input_dropout))
    for position, (fan_in, units) in enumerate(sizes):
        first, last = position == 0, position == len(sizes) - 1
        if config.fan_in is None or last:
            layer: nn.Module = nn.Linear(fan_in, units)
        else:
            layer = SparseLinear(fan_in, units, config.fan_in, generator)
        _initialise(layer, config, generator, first, last)
        model.append(layer)
        if not last:
            model.append(ACTIVATIONS[config.activation]())
            if config.dropout:
                model.append(nn.Dropout(config.dropout))
    return model, _criterion(config)


@torch.no_grad()
def _initialise(
    layer: nn.Module, config: Config, generator: torch.Generator, first: bool, last: bool
) -> None:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]), generator=generator)
    nn.init.zeros_(bias)
    if config.activation == "sigmoid":
        weight.mul_((1 if last else 2) * (1 if first else 2))
        if not first:
            bias.sub_(weight.sum(1) / 2)
    if config.inverted and first:
        bias.add_(weight.sum(1))
        weight.neg_()


def _criterion(config: Config) -> qd.OutputModel:
    if config.output == "categorical":
        return qd.Categorical()
    if config.output == "gaussian":
        return qd.Gaussian()
    if config.output == "learned-gaussian":
        return qd.LearnedGaussian(config.layers[-1], min_std=1 / 256)
    raise UsageError("output must be one of categorical, gaussian, learned-gaussian")


def parameter_count(model: nn.Module, criterion: nn.Module | None = None) -> int:
    """How many numbers are trained."""
    modules = [model] if criterion is None else [model, criterion]
    return sum(p.numel() for module in modules for p in module.parameters())
