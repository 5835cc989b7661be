"""The paper's eight algorithms by name, each made from the public classes of the library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

import quasidiag as qd

from .config import Config, suggest

#: In the order of the paper's Table 1, from the cheapest to the most expensive.
ALGORITHMS = ("SGD", "AdaGrad", "DOP", "QDOP", "DMCNat", "QDMCNat", "DNat", "QDNat")
#: All but DNat and QDNat: their exact metric needs a backward pass per output, too many for wide outputs.
INEXACT = ALGORITHMS[:6]

_PRESETS: dict[str, Callable[..., Optimizer]] = {
    preset.__name__: preset
    for preset in (qd.DOP, qd.QDOP, qd.DMCNat, qd.QDMCNat, qd.DNat, qd.QDNat)
}


def known_gamma(algorithm: str) -> float:
    """The authors' weight γ of a new minibatch in the metric's average: 0.01, or 0.1 for Monte Carlo, which is noisier."""
    return 0.1 if "MC" in algorithm else 0.01


def make(config: Config, model: nn.Module, criterion: qd.OutputModel) -> Optimizer:
    """The optimizer of a run, over the parameters of the network and of the criterion (learned variances)."""
    parameters = [*model.parameters(), *criterion.parameters()]
    if config.algorithm == "SGD":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)
    if config.algorithm == "AdaGrad":
        return qd.AdaGrad(parameters, lr=config.lr, gamma=config.gamma, eps=config.eps)
    if config.algorithm not in _PRESETS:
        raise suggest("algorithm", config.algorithm, ALGORITHMS)
    return _PRESETS[config.algorithm](
        model,
        criterion,
        lr=config.lr,
        gamma=config.gamma,
        eps=config.eps,
        floor=config.floor,
        samples=config.samples,
        momentum=config.momentum,
        seed=config.seed,
        nonfinite="raise",
        capturable=config.device != "cpu",
    )
