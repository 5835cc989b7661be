"""A placeholder state for ``torch.distributed.checkpoint`` to load into.

To find out which state a new optimizer will have, it takes a step with zero gradients and learning rates. That step has
no minibatch, so the state it creates is a placeholder: a checkpoint overwrites it, or it is dropped when training begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quasidiag.sharding import rows_of
from quasidiag.sums import dtype_of

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian


def wanted(optimizer: Riemannian) -> bool:
    """Whether this step is the one that ``torch.distributed.checkpoint`` takes: nothing seen yet, and every ``lr`` 0."""
    fresh = not optimizer.state and not optimizer._collector.passes
    return fresh and all(float(group["lr"]) == 0 for group in optimizer.param_groups)


def fill_(optimizer: Riemannian) -> None:
    """Create zeros for the metric, the squares of the diagonal rule, and the momentum."""
    for block in optimizer._blocks:
        rows, state = rows_of(block, optimizer.state)
        inputs = block.weight.shape[-1] if block.weight is not None and block.weight.dim() else 0
        a = torch.zeros(1, inputs, device=block.home.device)
        rows.start(state, a, dtype_of(block), identity=False)
    for parameter, group in optimizer._group.items():
        like = torch.zeros_like(
            parameter, dtype=torch.promote_types(parameter.dtype, torch.float32)
        )
        if parameter in optimizer._others:
            optimizer.state[parameter]["square"] = like
        if group["momentum"]:
            optimizer.state[parameter]["momentum"] = like.clone()


def there(optimizer: Riemannian) -> bool:
    """Whether the state is a placeholder."""
    if optimizer.steps or not optimizer.state:
        return False
    return not any(kept.get("updates") for kept in optimizer.state.values())
