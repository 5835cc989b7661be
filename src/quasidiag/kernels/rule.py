"""What turns a gradient into a step, once the metric is known."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rule(NamedTuple):
    r"""With :math:`w = M^{-1} (\text{scale} · v)`: ``buffer ← momentum·buffer + w``, ``θ ← decay·θ - lr·buffer``."""

    lr: float | Tensor = 0.0
    decay: float = 1.0
    momentum: float = 0.0
    eps: float = 1e-8
    floor: float = 1e-8
    scale: float = 1.0
