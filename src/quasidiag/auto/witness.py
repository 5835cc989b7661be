"""Detects a gradient scaler by its effect: gradients are smaller at the step than right after their backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from quasidiag.auto.directions import gathered

#: On a CPU it is enough to look at so many gradients, the smallest tensors that are not all zero.
FEW = 4
#: Relative difference up to which a factor counts as a power of two, or as the loss's weight: scalers divide in float32.
ROUNDING = 1e-3
#: A scaler whose factor has fallen below this is not noticed, because a loss may have such a weight of its own.
LEAST = 2.0


class Witness:
    """Remembers how large some gradients were at the end of their backward pass, to compare them at the step."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._shrunk: float | None = None

    def see(self, parameters: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
        """Note how large gradients are when a backward pass ends, unless the losses' ``weights`` rule a scaler out."""
        self._seen, self._shrunk = [], None
        weights = [*weights]
        if all(w.is_cpu for w in weights) and not _much(sum(abs(float(w)) for w in weights)):
            return
        dense = (p for p in parameters if p.grad is not None and not p.grad.is_sparse)
        have = sorted((p for p in dense if p.numel()), key=Tensor.numel)
        if any(not p.is_cpu for p in have):  # skipping zeros would wait for the device
            self._seen = [*zip(have, _sizes(have))]
            return
        for p in have:
            (size,) = _sizes([p])
            self._seen += [(p, size)] if size > 0 else []
            if len(self._seen) == FEW:
                break

    def look_again(self) -> None:
        """A step begins: compare the gradients anew, since they will not change any more."""
        self._shrunk = None

    def scale(self, total: float) -> float:
        """The scaler's factor, by which the loss was multiplied and its gradients divided again; 1 without a scaler.

        The weights of the losses add up to ``total``, which may include a scaler's factor or be the user's own. Gradients
        may also be smaller because they were clipped: if they shrank by no more than the root of ``total``, that is taken
        to be the only reason. If they shrank by more they were divided, by no more than they shrank.
        """
        if not _much(total):
            return 1.0
        if self._shrunk is None:  # once a step: comparing waits for the device
            self._shrunk = self._compare()
        shrunk = self._shrunk
        if not math.sqrt(total) < shrunk < math.inf:
            return 1.0
        for exact in (_power(shrunk), total):
            if math.isclose(shrunk, exact, rel_tol=ROUNDING):
                return exact
        return min(2.0 ** math.floor(math.log2(shrunk)), _power(total))

    def _compare(self) -> float:
        """How many times smaller the gradients are now than at the end of their backward pass."""
        have = [(p, size) for p, size in self._seen if p.grad is not None]
        if not have:
            return 1.0
        sizes = [*(size for _, size in have), *_sizes([p for p, _ in have])]
        before, now = gathered(sizes).view(2, -1).sum(1).tolist()
        return before / now if now > 0 else 1.0


def _much(total: float) -> bool:
    """Whether losses whose weights add up to ``total`` may have been scaled."""
    return LEAST * (1 - ROUNDING) <= total < math.inf


def _power(x: float) -> float:
    """The nearest power of two."""
    return 2.0 ** round(math.log2(x))


def _sizes(parameters: list[Tensor]) -> list[Tensor]:
    """The largest absolute value in each gradient."""
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    return [*torch._foreach_norm(grads, math.inf)] if grads else []
