"""Checks before a step: is there a gradient, and is the minibatch usable? When one fails, nothing has changed yet."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quasidiag import kernels, validate
from quasidiag.blocks import DiagonalBlock
from quasidiag.callers import outside
from quasidiag.sharding import local

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

Gradients = list[tuple[Tensor, Tensor]]

#: A warning names so many parameters.
NAMED = 6


def ready(optimizer: Riemannian) -> bool:
    """Whether the minibatch can be used; raises if the call makes no sense."""
    collector, exchange = optimizer._collector, optimizer._exchange
    for p in optimizer._group:
        if not p.requires_grad:
            p.grad = None  # may be zeros from zero_grad, by which momentum and averages would still move it
    if exchange is not None:
        exchange.average_strays_()
    gradients: Gradients = [(p, local(p.grad)) for p in optimizer._group if p.grad is not None]
    warn_of_thawed(optimizer)
    if not gradients:
        raise RuntimeError("step() without a gradient: call loss.backward() first")
    validate.gradients(gradients, optimizer.name_of)
    optimizer._structure.check(optimizer._group)
    if optimizer.auto is not None:
        for group in optimizer.param_groups:
            validate.auto_group(group)
    for block in optimizer._blocks:
        kept = optimizer.state.get(block.home, {})
        if "updates" in kept:
            validate.one_device(block, kept)
    seen = {optimizer._owner[record.module] for record in collector.records} | set(optimizer._sums)
    bad: Any = None if optimizer.capturable else not_finite(optimizer, gradients)
    if exchange is not None:
        device = gradients[0][1].device
        bad, collector.total, collector.passes, seen = exchange.meet(
            bad, collector.total, collector.passes, collector.divided, device
        )
    usable = bad is None or not bool(bad)
    # To look into a tensor would be to wait for the device.
    counted = not isinstance(collector.total, Tensor)
    none = collector.passes and counted and not collector.total
    if usable and none and optimizer.criterion is None:
        raise RuntimeError("the minibatch is empty: there is no sample in it to go by")
    if usable and (none or nothing_counts(optimizer)):
        message = "a minibatch was skipped: none of its targets counts, all are ignored"
        warnings.warn(message, RuntimeWarning, stacklevel=outside())
        return False
    if collector.due:
        moving = [b for b in optimizer._blocks if any(p.grad is not None for p in b.parameters)]
        if usable and not collector.passes and moving:
            raise RuntimeError(why_unseen(optimizer, moving[0]))
        for block in optimizer._blocks:
            unseen = block not in seen and not optimizer._started(block)
            if unseen and block.home.grad is not None:
                raise RuntimeError(why_unseen(optimizer, block))
    return usable or refuse(optimizer, gradients)


def nothing_counts(optimizer: Riemannian) -> bool:
    """Whether ``step="auto"`` was given losses without a term; several ranks only see that where the metric is due."""
    if optimizer._model is None or optimizer._exchange is not None:
        return False
    return optimizer._model.replay.void


def not_finite(optimizer: Riemannian, gradients: Gradients) -> bool | Tensor:
    """Whether anything in the minibatch is not finite, without waiting for the device."""
    kept = [record.w for record in optimizer._collector.records] + optimizer._sums.tensors()
    finite = kernels.finite([*(gradient for _, gradient in gradients), *kept])
    if finite is not None:
        return not finite
    # The largest entries: a sum of squares would overflow in float16.
    full = [gradient for _, gradient in gradients if gradient.numel()]
    norms = torch._foreach_norm(full, math.inf) if full else [torch.zeros(())]
    numbers = [*norms, *(x.sum() for x in kept)]
    device = numbers[0].device
    return ~torch.stack([x.float().to(device) for x in numbers]).isfinite().all()


def refuse(optimizer: Riemannian, gradients: Gradients) -> bool:
    """Skip the minibatch, or raise; with several ranks all do the same."""
    bad = [optimizer.name_of(p) for p, gradient in gradients if not gradient.isfinite().all()]
    bad = bad or ["the metric"]
    message = f"a minibatch was skipped: its gradient is not finite in {', '.join(bad[:3])}"
    if optimizer.nonfinite == "raise":
        optimizer._forget()
        raise FloatingPointError(message + ". Lower the learning rate, or look at the data.")
    warnings.warn(message, RuntimeWarning, stacklevel=outside())
    return False


def why_unseen(optimizer: Riemannian, block: DiagonalBlock) -> str:
    """The error message for a layer that has a gradient but no metric, with the likely reason."""
    compiled = (
        ". A compiled model that ran before the optimizer was made does not hear of it: torch.compiler.reset()"
        if "torch._dynamo" in sys.modules and torch._dynamo.utils.counters["stats"]
        else ""
    )
    if optimizer.criterion is not None and not optimizer._collector.passes:
        return (
            "the metric saw no loss: it must come from the very criterion object that the optimizer was given, "
            "criterion(model(x), t), not from F.cross_entropy or another criterion, and from a forward pass in training "
            "mode made after the optimizer" + compiled
        )
    if optimizer._collector.probe.recomputed:
        return (
            f"{block.name} ran only inside an activation checkpoint's second forward pass, which the "
            f"{optimizer.metric} metric cannot see: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), "
            "or metric='outer-product'"
        )
    if optimizer.criterion is not None and optimizer.metric != "outer-product":
        return (
            f"{block.name} has a gradient, but the criterion's output does not depend on it: the {optimizer.metric} "
            "metric sees no other loss, metric='outer-product' does. Or its weight was used without calling the layer, or "
            "its forward pass was not in training mode, or came before the optimizer" + compiled
        )
    return (
        f"the metric saw no backward pass through {block.name}: call model.train(), and make the forward pass "
        "after the optimizer" + compiled
    )


def idle(optimizer: Riemannian) -> list[Tensor]:
    """Parameters left out because they were frozen when the optimizer took all trainable ones; they may thaw later."""
    if not optimizer.whole:
        return []
    both = (
        [optimizer.model] if optimizer.criterion is None else [optimizer.model, optimizer.criterion]
    )
    return [p for module in both for p in module.parameters() if p not in optimizer._group]


def warn_of_thawed(optimizer: Riemannian) -> None:
    """Warn once of parameters that were frozen, now have a gradient, and are in no param group."""
    thawed = [p for p in optimizer._idle if p.requires_grad and p.grad is not None]
    names = [optimizer.name_of(p) for p in thawed if p not in optimizer._group]
    if thawed:
        optimizer._idle = [p for p in optimizer._idle if not any(p is q for q in thawed)]
    if names:
        warnings.warn(
            f"{', '.join(names)}: frozen when the optimizer was made, trainable now, and not trained. Hand it over with "
            "optimizer.add_param_group({'params': ...})",
            stacklevel=outside(),
        )


def warn_of_others(others: Collection[Tensor], model: nn.Module) -> None:
    """Warn of parameters that have no known block structure, each with the class of its layer."""
    left = set(others)
    found = [
        f"{name} ({type(model.get_submodule(name.rpartition('.')[0])).__name__})"
        for name, p in model.named_parameters()
        if p in left
    ]
    if found:
        every = sum(p.numel() for p in model.parameters())
        part = sum(p.numel() for p in left) / max(1, every)
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        warnings.warn(
            f"no block structure is known for {', '.join(found[:NAMED])}{more} ({part:.1%} of all numbers): what is in no "
            "known layer follows the diagonal rule of qd.AdaGrad. qd.register_layer teaches quasidiag a new layer.",
            stacklevel=outside(),
        )
