"""Directions in the space of the parameters: products with them, parameters moved along them, and means over ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quasidiag import distributed, kernels
from quasidiag.moments import cast

Direction = Mapping[Tensor, Tensor]

#: Tensors of up to so many numbers are multiplied with others of their size in one call.
SMALL = 2**14


def before_way(update: Direction) -> dict[Tensor, Tensor]:
    """Where parameters were before they moved by ``update``; subtracted in the precision of ``update``, then rounded."""
    now = [cast(p.detach(), u.dtype) for p, u in update.items()]
    before = torch._foreach_sub(now, [*update.values()])
    return {p: cast(x, p.dtype) for p, x in zip(update, before)}


def after_step(
    directions: Sequence[Direction], coefficients: Sequence[float]
) -> dict[Tensor, Tensor]:
    """Where parameters would be after a step along ``directions`` with these coefficients."""
    found: dict[Tensor, Tensor] = {}
    for u, x in zip(directions, coefficients):
        before = [found.get(p, p.detach()) for p in u]
        ws = [cast(w, p.dtype) for p, w in u.items()]
        found |= zip(u, torch._foreach_add(before, ws, alpha=x))
    return found


def dots(covector: Direction, directions: Sequence[Direction]) -> list[float]:
    """The product of ``covector`` with each direction, over the parameters that both have."""
    pairs = [
        (i, v, cast(g, v.dtype))
        for i, u in enumerate(directions)
        for p, v in u.items()
        if (g := covector.get(p)) is not None
    ]
    total = [0.0] * len(directions)
    if not pairs:
        return total
    of, vs, gs = zip(*pairs)
    for i, x in zip(of, products(vs, gs)):
        total[i] += x
    return total


def products(us: Sequence[Tensor], vs: Sequence[Tensor]) -> list[float]:
    """The inner product of each pair of tensors; waits for a device only once."""
    found = kernels.dots(us, vs)
    if found is not None:
        return found
    alike: dict[Hashable, list[int]] = {}
    for i, u in enumerate(us):
        small = u.numel() <= SMALL
        alike.setdefault((u.numel(), u.dtype, u.device) if small else i, []).append(i)
    each = [_dots([us[i] for i in some], [vs[i] for i in some]) for some in alike.values()]
    order = [i for some in alike.values() for i in some]
    numbers = torch.cat([x.to(each[0].device).double() for x in each]).cpu().tolist()
    return [x for _, x in sorted(zip(order, numbers))]


def _dots(us: Sequence[Tensor], vs: Sequence[Tensor]) -> Tensor:
    """The inner products of tensors of one size, stacked if there are several: on a device calls cost more than copies."""
    if len(us) == 1:
        return torch.dot(us[0].flatten(), vs[0].flatten()).unsqueeze(0)
    u, v = (torch.stack([x.flatten() for x in some]) for some in (us, vs))
    return (u * v).sum(1)


def dot(covector: Direction, u: Direction) -> float:
    """The product of ``covector`` with one direction."""
    return dots(covector, [u])[0]


def gathered(numbers: Sequence[Tensor]) -> Tensor:
    """The numbers as one tensor, in float64 on the CPU: this waits for a device once, not once for each of them."""
    return torch.stack([x.to(numbers[0].device) for x in numbers]).double().cpu()


def mean(numbers: Tensor, ranks: Any) -> Tensor:
    """The mean over the process group ``ranks``; ``None`` if there is but one rank."""
    return numbers if ranks is None else distributed.mean(numbers, ranks)


def means(numbers: Sequence[float], ranks: Any) -> Sequence[float]:
    """:func:`mean` of plain numbers."""
    if ranks is None:
        return numbers
    return mean(torch.tensor(numbers, dtype=torch.float64), ranks).tolist()
