r"""Weight decay as a part of the loss.

AdamW shrinks weights by ``lr`` times ``weight_decay`` in each step; here there is no ``lr``. So
:math:`\tfrac12 λ ‖θ‖^2` is a part of the loss, as in ``torch.optim.SGD``: its slope is in the gradient, and its curvature,
which is known exactly, in the quadratic model and in the metric. (Of a penalty that users add to the loss themselves, only
the slope is known.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quasidiag.auto.directions import Direction, gathered, products
from quasidiag.moments import cast

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian


class Penalty:
    r"""The weight decay :math:`\tfrac12 \sum λ θ^2` in one step; ``decays`` has the :math:`λ` of each parameter with one."""

    def __init__(self, decays: dict[Tensor, float]) -> None:
        self.decays = decays

    def gradient(self, p: Tensor, g: Tensor) -> Tensor:
        """The gradient ``g`` of a parameter, that of its decay added. Where nothing decays it is not looked up."""
        decay = self.decays.get(p) if self.decays else None
        return g if decay is None else g.add(p, alpha=decay)

    @cached_property
    def now(self) -> float:
        """Its value at the current parameters, which is computed once."""
        return self.value({})

    def value(self, at: Direction) -> float:
        """Its value with the parameters ``at`` in the place of the model's."""
        if not self.decays:
            return 0.0
        places = (at.get(p, p).detach() for p in self.decays)
        norms = gathered([torch.linalg.vector_norm(x, dtype=torch.float64) for x in places])
        return sum(decay / 2 * x**2 for decay, x in zip(self.decays.values(), norms.tolist()))

    def slopes(self, directions: Sequence[Direction]) -> Tensor:
        """Its slope along each direction."""
        here: Direction = {p: p.detach() for p in self.decays}
        return torch.tensor([self._product(here, u) for u in directions], dtype=torch.float64)

    def forms(self, directions: Sequence[Direction]) -> Tensor:
        r"""Its curvature: the products :math:`λ u^⊤ v` of all pairs of directions."""
        found = [[self._product(u, v) for v in directions] for u in directions]
        return torch.tensor(found, dtype=torch.float64)

    def _product(self, u: Direction, v: Direction) -> float:
        both = [p for p in self.decays if p in u and p in v]
        if not both:
            return 0.0
        found = products([cast(u[p], v[p].dtype) for p in both], [v[p] for p in both])
        return sum(self.decays[p] * x for p, x in zip(both, found))


def penalty(optimizer: Riemannian) -> Penalty:
    """The weight decay of the current param groups, also set in the blocks; a criterion's own parameters do not decay."""
    some = [group for group in optimizer.param_groups if group["weight_decay"]]
    own = {*optimizer.criterion.parameters()} if some and optimizer.criterion is not None else set()
    decays = {
        p: float(group["weight_decay"])
        for group in some
        for p in group["params"]
        if p.requires_grad and p not in own
    }
    for block in optimizer._blocks:
        if decays or block.decays:
            block.decays = tuple(decays.get(p, 0.0) for p in block.parameters)
    return Penalty(decays)
