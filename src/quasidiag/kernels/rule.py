"""What turns a gradient into a step, once the metric is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Rule(NamedTuple):
    r"""With :math:`w = M^{-1} (\text{scale} · v)`: ``buffer ← momentum·buffer + w``, ``θ ← decay·θ - lr·buffer``."""

    lr: float | Tensor = 0.0
    decay: float = 1.0
    momentum: float = 0.0
    eps: float = 1e-8
    floor: float = 1e-8
    scale: float = 1.0

    @classmethod
    def of(cls, group: Mapping[str, Any], scale: float = 1.0) -> Rule:
        """The rule of a param group."""
        lr, decay, eps, floor = (group[key] for key in ("lr", "weight_decay", "eps", "floor"))
        return cls(
            lr=lr,
            decay=1 - lr * decay if decay else 1.0,
            momentum=group["momentum"],
            eps=eps,
            floor=eps if floor is None else floor,
            scale=-scale if group["maximize"] else scale,
        )
