"""Runs the model on a minibatch again, with other parameters or along directions, and leaves no trace.

Derivatives of the outputs along directions are taken by forward-mode differentiation, or by differences where an operation
has no forward mode. The model runs as it did the first time (dropout masks, autocast), and its buffers (a batch norm's
statistics) and the random state are not changed.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from quasidiag.auto.calls import Batch
from quasidiag.auto.directions import Direction
from quasidiag.auto.standing_in import plain_kernels, standing_in
from quasidiag.moments import cast
from quasidiag.probe import tensors
from quasidiag.strata import Part

Moved = tuple[Tensor, Tensor, list[Tensor]]

#: How derivatives are taken, the first that works: in forward mode, with torch's decompositions of a few operations that
#: have none (a softmax's backward, in a model that takes a gradient itself; ``make_dual`` compiles them at first use, which
#: takes as long as a hundred steps of a small network), with plain kernels as well, by differences.
WAYS = "fast", "decomposed", "plain", "differences"
#: Forward mode has one level for all threads of a process: a second one that enters it meanwhile gets an error.
LEVEL = threading.RLock()


def _renew() -> None:
    """In a forked process, whoever held the lock is gone."""
    global LEVEL
    LEVEL = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class Rerun:
    """Runs ``model`` again, on all samples of a minibatch or on a part of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        #: One of ``WAYS``.
        self.mode = WAYS[0]

    def slower(self) -> bool:
        """Take derivatives in the next way from now on; false if there is none."""
        later = WAYS[WAYS.index(self.mode) + 1 :]
        self.mode = later[0] if later else self.mode
        return bool(later)

    def tangents(self, batch: Batch, directions: Sequence[Direction], part: Part | None) -> Moved:
        """The outputs, their targets, and the derivative of the outputs along each direction."""
        target = batch.targets(part)
        if self.mode == "differences":
            moved = [self._difference(batch, u, part) for u in directions]
            return self.run(batch, {}, part), target, moved
        duals = [self._dual(batch, u, part) for u in directions]
        return duals[0][0], target, [tangent for _, tangent in duals]

    def tried(
        self, batch: Batch, part: Part, parameters: Direction = MappingProxyType({})
    ) -> Tensor | None:
        """The output for a part of the samples, as :meth:`run`; ``None`` if the model does not run on it."""
        try:
            return self.run(batch, parameters, part)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # whatever the model raises if an input does not fit
            return None

    @property
    def module(self) -> nn.Module:
        """The model itself, without the wrappers of ``torch.compile`` and DDP."""
        model: Any = self.model
        while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
            model = getattr(model, "_orig_mod", None) or model.module
        return model

    def run(
        self, batch: Batch, parameters: Direction, part: Part | None = None, full: bool = False
    ) -> Tensor:
        """The output as the criterion reads it, with these parameters in the place of the model's; ``full``: no autocast."""
        assert batch.reading is not None
        args, kwargs = batch.call.given(part)
        module, around = self.module, batch.call.around
        autocast: AbstractContextManager[object] = nullcontext()
        if around.autocast:
            kind, dtype = around.kind, around.dtype
            autocast = torch.autocast(kind, dtype, enabled=not full, cache_enabled=False)
        with around.again(), torch.no_grad(), autocast, standing_in(module, parameters):
            outputs = module(*args, **kwargs)
        return batch.reading.of(list(tensors(outputs)), 1.0 if part is None else part.share)

    def _dual(self, batch: Batch, direction: Direction, part: Part | None) -> tuple[Tensor, Tensor]:
        with ExitStack() as stack:
            if self.mode == "plain":
                stack.enter_context(plain_kernels())
            stack.enter_context(LEVEL)
            level = stack.enter_context(forward_ad.dual_level())
            make = torch._VF._make_dual if self.mode == "fast" else forward_ad.make_dual
            duals = {
                p: make(p.detach(), cast(u, p.dtype), level=level) for p, u in direction.items()
            }
            output, tangent = forward_ad.unpack_dual(self.run(batch, duals, part))
        return output, torch.zeros_like(output) if tangent is None else tangent

    def _difference(self, batch: Batch, direction: Direction, part: Part | None) -> Tensor:
        """A central difference, over a distance that balances rounding and curvature."""
        size = math.sqrt(sum(float(p.detach().double().square().sum()) for p in direction)) or 1.0
        length = math.sqrt(sum(float(u.double().square().sum()) for u in direction.values()))
        if length == 0.0:
            return torch.zeros_like(self.run(batch, {}, part, full=True))
        h = torch.finfo(next(iter(direction)).dtype).eps ** (1 / 3) * size / length
        ahead, behind = (
            self.run(
                batch,
                {p: p.detach() + sign * h * u.to(p.dtype) for p, u in direction.items()},
                part,
                full=True,
            )
            for sign in (1, -1)
        )
        return (ahead - behind) / (2 * h)
