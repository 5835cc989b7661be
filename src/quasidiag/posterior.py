"""Samples of parameters from a run of :class:`quasidiag.Langevin`, and their averaged predictions."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Posterior:
    r"""Samples of a model's parameters, to average predictions over, :math:`p(t|x) = \frac1K \sum_k p(t|x, θ_k)`::

        posterior = Posterior(model)
        for step, (x, t) in enumerate(batches):
            ...
            optimizer.step()
            if step >= burn_in and step % 50 == 0:
                posterior.collect()
        probabilities = posterior(x).softmax(-1).mean(0)  # a classifier
        mean, std = posterior(x).mean(0), posterior(x).std(0)  # a regressor, without the targets' own noise

    Args:
        model: the model that is sampled; making predictions does not change it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        #: Parameters and buffers by name, a dictionary for each sample; save and load it as you like.
        self.samples: list[dict[str, Tensor]] = []

    def collect(self) -> None:
        """Keep a copy of the parameters and buffers as they are now."""
        now = chain(self.model.named_parameters(), self.model.named_buffers())
        self.samples.append({name: value.detach().clone() for name, value in now})

    def __len__(self) -> int:
        return len(self.samples)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs of every sample, ``[samples, *output.shape]``, in evaluation mode."""
        if not self.samples:
            raise RuntimeError("there is no sample yet: call collect() now and then while training")
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            outputs = [functional_call(self.model, s, args, kwargs) for s in self.samples]
        finally:
            for module, training in modes.items():
                module.training = training
        if not isinstance(outputs[0], Tensor):
            raise TypeError(
                f"{type(self.model).__name__} returns a {type(outputs[0]).__name__}, and a Posterior stacks tensors: "
                "wrap the model in a module that returns the one to predict with"
            )
        return torch.stack(outputs)
