"""AdaGrad, the paper's adaptive baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quasidiag.together import diagonal_rule


class AdaGrad(Optimizer):
    r"""AdaGrad with a moving average, as in the paper (now known as RMSProp).

    .. math::
        M &← (1-γ) M + γ v^2 \\
        θ &← θ - η \frac{v}{\sqrt{M} + ε}

    with :math:`v` the minibatch's gradient; the first minibatch sets :math:`M`.
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, gamma: float = 0.01, eps: float = 1e-8
    ) -> None:
        if not 0 <= float(lr) < math.inf or not 0 <= gamma <= 1 or not 0 <= eps < math.inf:
            raise ValueError(
                f"lr={lr}, gamma={gamma}, eps={eps}: all must be finite and not negative, gamma at most 1"
            )
        super().__init__(params, dict(lr=lr, gamma=gamma, eps=eps))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gamma, eps = group["gamma"], group["eps"]
                (w,) = diagonal_rule([self.state[p]], [p.grad], gamma, eps, batch=False)
                p.sub_(group["lr"] * w)
        return loss
