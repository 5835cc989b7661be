"""The contenders: each is a training step on its own copy of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import quasidiag as qd
from quasidiag.bench.workloads import Workload


class Step:
    """Forward, backward and update on the workload's next batch, as in an ordinary training loop."""

    def __init__(
        self, workload: Workload, make: Callable[[nn.Module, qd.OutputModel], Optimizer]
    ) -> None:
        self.workload = workload
        self.model = workload.copy()
        self.criterion = qd.Categorical().to(workload.device)
        self.optimizer = make(self.model, self.criterion)
        self.batches = workload.batches()
        #: quasidiag's criterion for its own optimizers, which read the outputs from it; PyTorch's for all others.
        self.loss: Callable[[Tensor, Tensor], Tensor] = self._plain_loss
        if isinstance(self.optimizer, qd.Riemannian):
            self.loss = self.criterion

    @staticmethod
    def _plain_loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        x, target = next(self.batches)
        with self.workload.precision():
            loss = self.loss(self.model(x), target)
        loss.backward()
        self.optimizer.step()

    def state_bytes(self) -> int:
        """The bytes of the tensors in the optimizer's state."""
        return sum(
            t.numel() * t.element_size()
            for state in self.optimizer.state.values()
            for t in state.values()
            if isinstance(t, Tensor)
        )


Make = Callable[[Workload], Callable[[], object]]


def torch_optimizer(kind: Callable[..., Optimizer], **options: Any) -> Make:
    """A contender whose optimizer takes parameters, as those of ``torch.optim`` do."""
    return lambda workload: Step(workload, lambda model, _: kind(model.parameters(), **options))


def ours(kind: Callable[..., Optimizer], **options: Any) -> Make:
    """A contender whose optimizer takes model and criterion, as those of quasidiag do."""

    def make(workload: Workload) -> Step:
        more = {"capturable": True} if workload.device.type == "cuda" else {}
        return Step(workload, lambda model, loss: kind(model, loss, lr=1e-4, **more, **options))

    return make


PAPER: dict[str, Make] = {
    "SGD": torch_optimizer(torch.optim.SGD, lr=1e-3),
    "AdaGrad": torch_optimizer(qd.AdaGrad, lr=1e-4),
    "DOP": ours(qd.DOP),
    "QDOP": ours(qd.QDOP),
    "DMCNat": ours(qd.DMCNat),
    "QDMCNat": ours(qd.QDMCNat),
    "DNat": ours(qd.DNat),
    "QDNat": ours(qd.QDNat),
}

#: Without a learning rate: the optimizer computes the length of its step.
AUTOMATIC: dict[str, Make] = {
    "Riemannian (auto)": lambda workload: Step(workload, qd.Riemannian),
}

#: A cheaper metric: taken on a share of the samples, or only every few steps.
AMORTISED: dict[str, Make] = {
    "QDOP, metric on 1/10": ours(qd.QDOP, metric_fraction=0.1),
    "QDOP, metric every 10": ours(qd.QDOP, metric_every=10),
    "QDMCNat, metric every 10": ours(qd.QDMCNat, metric_every=10),
}

TORCH: dict[str, Make] = {
    "RMSprop": torch_optimizer(torch.optim.RMSprop, lr=1e-4),
    "AdamW": torch_optimizer(torch.optim.AdamW, lr=1e-4),
    "AdamW fused": torch_optimizer(torch.optim.AdamW, lr=1e-4, fused=True),
}
