r"""Weight decay, where a step has no length of its own.

Without an ``lr`` there is nothing that weights could decay by from step to step. So :math:`\tfrac12 λ ‖θ‖^2` is a part of
the loss, as in ``torch.optim.SGD``: its slope is in the gradient, and its curvature, which is known exactly, in the
quadratic model. (A penalty that somebody adds to the loss has the slope alone.)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from quasidiag.directions import Direction, dot, gathered

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

NOWHERE: Direction = MappingProxyType({})


class Penalty(NamedTuple):
    """With the :math:`λ` of each parameter that has one."""

    decays: dict[Tensor, float]

    def value(self, at: Direction = NOWHERE) -> float:
        """What it comes to, with the parameters ``at`` in the place of the model's."""
        if not self.decays:
            return 0.0
        places = (at.get(p, p).detach() for p in self.decays)
        norms = gathered([torch.linalg.vector_norm(x, dtype=torch.float64) for x in places])
        return sum(decay / 2 * x**2 for decay, x in zip(self.decays.values(), norms.tolist()))

    def slopes(self, directions: Sequence[Direction]) -> Tensor:
        """Along each direction."""
        gradient = {p: decay * p.detach() for p, decay in self.decays.items()}
        return torch.tensor([dot(gradient, u) for u in directions], dtype=torch.float64)

    def forms(self, directions: Sequence[Direction]) -> Tensor:
        r"""The products :math:`λ u^⊤ v` of directions, of each with each."""
        of = [{p: self.decays[p] * w for p, w in u.items() if p in self.decays} for u in directions]
        return torch.tensor([[dot(u, v) for v in directions] for u in of], dtype=torch.float64)


def penalty(optimizer: Riemannian) -> Penalty:
    """That of the param groups as they are now; a criterion's own parameters (standard deviations, say) do not decay."""
    own = optimizer.criterion.parameter_fisher() if optimizer.criterion is not None else {}
    return Penalty(
        {
            p: float(group["weight_decay"])
            for group in optimizer.param_groups
            if group["weight_decay"]
            for p in group["params"]
            if p.requires_grad and p not in own
        }
    )
