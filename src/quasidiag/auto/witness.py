"""Detects a gradient scaler by its effect: gradients are smaller at the step than right after their backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from quasidiag.auto.directions import gathered

#: So many of the smallest gradients that are not zero are enough.
FEW = 4
#: How far a factor may be from what it is taken for: the scaler divides in float32.
ROUNDING = 1e-3
#: A scaler that has come down to less is not noticed: losses have weights of their own.
LEAST = 2.0


class Witness:
    """Has seen the gradients of some parameters when their backward pass ended."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._shrunk: float | None = None

    def see(self, parameters: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
        """A backward pass is over, of losses that have these weights so far. Little as they are, nobody scales them."""
        self._seen, self._shrunk = [], None
        weights = [*weights]
        if all(w.is_cpu for w in weights) and not _much(sum(abs(float(w)) for w in weights)):
            return
        dense = (p for p in parameters if p.grad is not None and not p.grad.is_sparse)
        have = sorted((p for p in dense if p.numel()), key=Tensor.numel)
        if any(not p.is_cpu for p in have):  # to look for zeros would be to wait
            self._seen = [*zip(have, _sizes(have))]
            return
        for p in have:
            (size,) = _sizes([p])
            self._seen += [(p, size)] if size > 0 else []
            if len(self._seen) == FEW:
                break

    def look_again(self) -> None:
        """A step begins: the gradients are what they will be."""
        self._shrunk = None

    def scale(self, total: float) -> float:
        """What the loss was multiplied by, and its gradients are divided by again; 1 if they are not.

        Losses with weights that add up to ``total`` may be a scaler's, or only somebody's who multiplies them by that.
        Gradients that were clipped are smaller too: by no more than a root of it, they are nothing but clipped. By more
        they may have been divided, and then it was by no more than they shrank.
        """
        if not _much(total):
            return 1.0
        if self._shrunk is None:  # a step asks several times, and a device is waited for
            self._shrunk = self._compare()
        shrunk = self._shrunk
        if not math.sqrt(total) < shrunk < math.inf:
            return 1.0
        for exact in (_power(shrunk), total):
            if math.isclose(shrunk, exact, rel_tol=ROUNDING):
                return exact
        return min(2.0 ** math.floor(math.log2(shrunk)), _power(total))

    def _compare(self) -> float:
        """How many times smaller the gradients are now."""
        have = [(p, size) for p, size in self._seen if p.grad is not None]
        if not have:
            return 1.0
        sizes = [*(size for _, size in have), *_sizes([p for p, _ in have])]
        before, now = gathered(sizes).view(2, -1).sum(1).tolist()
        return before / now if now > 0 else 1.0


def _much(total: float) -> bool:
    """Whether losses of so much weight may be scaled."""
    return LEAST * (1 - ROUNDING) <= total < math.inf


def _power(x: float) -> float:
    """The nearest of two."""
    return 2.0 ** round(math.log2(x))


def _sizes(parameters: list[Tensor]) -> list[Tensor]:
    """The largest number of each gradient."""
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    return [*torch._foreach_norm(grads, math.inf)] if grads else []
