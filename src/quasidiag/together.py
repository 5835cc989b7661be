r"""Updates of many small tensors in one call, like ``foreach`` in ``torch.optim``.

In a network of hundreds of small layers the calls of a step take more time than the arithmetic. So blocks whose units
have equally many inputs are concatenated and solved as one, and elementwise work goes through ``torch._foreach_*``. A loop
over single tensors does the same, for large tensors and as the oracle of the tests. (The step without an ``lr`` has
:mod:`quasidiag.auto.stacks` instead.)
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quasidiag.blocks import DiagonalBlock, Update
from quasidiag.kernels.rule import Rule
from quasidiag.moments import PLAIN
from quasidiag.sharding import like, local, rows_of
from quasidiag.sums import dtype_of

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

#: Tensors (of a block: all together) of up to this many numbers are batched by default. For larger ones the time goes
#: into memory traffic, to which the copies of a batch would add.
SMALL = 4_096

Pairs = Iterable[tuple[nn.Parameter, Tensor]]


def wanted(foreach: bool | None, tensors: Sequence[Tensor]) -> bool:
    """Whether these go into a batch: plain tensors only, and only small ones if ``foreach`` is ``None``."""
    if foreach is False or not all(type(t) in PLAIN for t in tensors):
        return False
    return foreach is True or sum(t.numel() for t in tensors) <= SMALL


def batches(optimizer: Riemannian) -> dict[DiagonalBlock, list[DiagonalBlock]]:
    """For each block that is solved together with others, the batch of all these blocks."""
    alike: dict[Hashable, list[DiagonalBlock]] = {}
    if optimizer.foreach is not False:
        for block in optimizer._blocks:
            ready = all(p.grad is not None for p in block.parameters) and optimizer._known(block)
            if block.kind is not None and ready and wanted(optimizer.foreach, block.parameters):
                home = block.home
                key = (block.kind, home.dtype, home.device, id(optimizer._group[home]))
                alike.setdefault(key, []).append(block)
    return {block: batch for batch in alike.values() if len(batch) > 1 for block in batch}


def advance_(optimizer: Riemannian, batches: Collection[DiagonalBlock]) -> set[DiagonalBlock]:
    """Update metric and parameters together where a kernel can; returns those blocks, and removes their records."""
    collector = optimizer._collector
    if not collector.due or optimizer._exchange is not None or optimizer._sums:
        return set()
    owners = [optimizer._owner[record.module] for record in collector.records]
    done, left, factor = set(), [], collector.factor()
    for block, record in zip(owners, collector.records):
        alone = block not in batches and owners.count(block) == 1 and optimizer._started(block)
        gamma = optimizer._gamma(block) if alone else 0.0
        if alone and descend_(optimizer, block, Update(*record, 1 - gamma, gamma * factor)):
            done.add(block)
        else:
            left.append(record)
    collector.records = left
    return done


def descend_(optimizer: Riemannian, block: DiagonalBlock, update: Update | None = None) -> bool:
    """Solve and step in one call, after an ``update`` of the metric if there is one; ``False`` where no kernel can."""
    if not optimizer._fused:
        return False
    group, total = optimizer._group[block.home], optimizer._collector.total
    gradients = [local(p.grad) for p in block.parameters if p.grad is not None]
    one_group = all(optimizer._group[p] is group for p in block.parameters)
    summed = optimizer.criterion is None and optimizer.loss_reduction == "sum"
    if len(gradients) < len(block.parameters) or not one_group:
        return False
    if summed and isinstance(total, Tensor):
        return False
    lr = group["lr"]
    if isinstance(lr, Tensor) and (group["weight_decay"] or lr.device != block.home.device):
        return False
    if group["momentum"]:
        for p in block.parameters:
            if "momentum" not in optimizer.state[p]:
                dtype = torch.promote_types(p.dtype, torch.float32)
                optimizer.state[p]["momentum"] = torch.zeros_like(p, dtype=dtype)
    rule = Rule.of(group, 1 / float(total) if summed else 1.0)
    rows, state = rows_of(block, optimizer.state)
    if update is not None:
        return rows.advance_(state, update, gradients, rule)
    return rows.descend_(state, gradients, rule)


def diagonal_rule(
    states: Sequence[dict[str, Any]], vs: Sequence[Tensor], gamma: float, eps: float, batch: bool
) -> list[Tensor]:
    r"""Returns :math:`v/(\sqrt M + ε)`, after :math:`M ← (1-γ) M + γ v^2` in each state's ``square``; the first sets it."""
    if not batch:
        return [_diagonal_rule(state, v, gamma, eps) for state, v in zip(states, vs)]
    vs = list(vs)
    squares = torch._foreach_mul(vs, vs)
    kept = [state.setdefault("square", square) for state, square in zip(states, squares)]
    torch._foreach_lerp_(kept, squares, gamma)
    roots = torch._foreach_sqrt(kept)
    torch._foreach_add_(roots, eps)
    ws = torch._foreach_div(vs, roots)
    return [torch.where(r > 0, w, 0.0) for r, w in zip(roots, ws)] if eps == 0 else list(ws)


def _diagonal_rule(state: dict[str, Any], v: Tensor, gamma: float, eps: float) -> Tensor:
    if "square" not in state:
        state["square"] = v.square()
    else:
        state["square"].lerp_(v.square(), gamma)
    root = state["square"].sqrt() + eps
    return torch.where(root > 0, v / root, 0.0)


def others(optimizer: Riemannian) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The directions of the parameters that are in no block, by the diagonal rule."""
    given = ((p, optimizer._gradient(p)) for p in optimizer._others if p.grad is not None)
    for pairs, batch in _sorted(optimizer, given):
        group = optimizer._group[pairs[0][0]]
        states, vs = [optimizer.state[p] for p, _ in pairs], [v for _, v in pairs]
        ws = diagonal_rule(states, vs, group["gamma"], group["eps"], batch)
        yield from zip((p for p, _ in pairs), ws)


def apply_(optimizer: Riemannian, directions: Pairs) -> None:
    r""":math:`u ← μu + w`, :math:`θ ← (1 - ηλ)θ - ηu` with the momentum and the weight decay of the group."""
    for pairs, batch in _sorted(optimizer, directions):
        group = optimizer._group[pairs[0][0]]
        if not batch:
            _apply_(optimizer, group, *pairs[0])
            continue
        ps: list[Tensor] = [p for p, _ in pairs]
        ws, lr = [w for _, w in pairs], group["lr"]
        if group["momentum"]:
            states = [optimizer.state[p] for p in ps]
            known = [i for i, state in enumerate(states) if "momentum" in state]
            if known:
                buffers = [states[i]["momentum"] for i in known]
                torch._foreach_mul_(buffers, group["momentum"])
                torch._foreach_add_(buffers, [ws[i] for i in known])
            for state, w in zip(states, ws):
                if "momentum" not in state:
                    state["momentum"] = w.clone()  # w may be a view of the whole batch's
            ws = [state["momentum"] for state in states]
        if group["weight_decay"]:
            torch._foreach_mul_(ps, 1 - lr * group["weight_decay"])
        if isinstance(lr, Tensor):
            steps = torch._foreach_mul(ws, lr)
            torch._foreach_sub_(ps, _cast(steps, ps[0].dtype))
        else:
            torch._foreach_add_(ps, _cast(ws, ps[0].dtype), alpha=-lr)


def _apply_(optimizer: Riemannian, group: dict[str, Any], p: nn.Parameter, w: Tensor) -> None:
    lr = group["lr"]
    if group["momentum"]:
        state = optimizer.state[p]
        if "momentum" not in state:
            state["momentum"] = w.clone()
        else:
            state["momentum"].mul_(group["momentum"]).add_(w)
        w = state["momentum"]
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    if isinstance(lr, Tensor):
        p.sub_((lr * w).to(p.dtype))
    else:
        p.add_(w.to(p.dtype), alpha=-lr)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) for t in tensors]


def _sorted(
    optimizer: Riemannian, pairs: Pairs
) -> Iterator[tuple[list[tuple[nn.Parameter, Tensor]], bool]]:
    """Single pairs as they come, then batches of pairs that go together; and whether it is a batch."""
    waiting: dict[Hashable, list[tuple[nn.Parameter, Tensor]]] = {}
    for p, w in pairs:
        group = optimizer._group[p]
        lr = group["lr"]
        here = not isinstance(lr, Tensor) or lr.device == p.device
        if here and wanted(optimizer.foreach, (p, w)):
            waiting.setdefault((id(group), p.dtype, w.dtype, p.device), []).append((p, w))
        else:
            yield [(p, w)], False
    for batch in waiting.values():
        yield batch, True


def solved(
    optimizer: Riemannian, batch: list[DiagonalBlock]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The Riemannian gradients of blocks that are solved with one call."""
    block, group = batch[0], optimizer._group[batch[0].home]
    dtype, damping = dtype_of(block, optimizer.state), (group["eps"], group["floor"])
    gradients = [[local(optimizer._gradient(p)).to(dtype) for p in b.parameters] for b in batch]
    if len(batch) > 1:
        found = block.solve_together(batch, optimizer.state, gradients, *damping)
    else:
        rows, state = rows_of(block, optimizer.state)
        whole = all(p.grad is not None for p in block.parameters)
        found = [(rows.solve if whole else rows.solve_part)(state, gradients[0], *damping)]
    for block, ws in zip(batch, found):
        for p, w in zip(block.parameters, ws):
            if p.grad is not None:
                yield p, like(w, p)
