r"""Between the steps: the parameters at rest are an average of where the steps led.

Steps of the same strength in all directions do not get shorter near the bottom of a valley: they cross it, to and fro. So
the places :math:`z` that training comes to are averaged,

.. math:: x ← x + \tfrac1w (z - x),

and :math:`x` is what the model holds between two steps, when it is evaluated or saved. A forward pass that will be
backpropagated begins by moving ahead to :math:`z = x + e`, and a step that moved by :math:`δ` ends by coming back:
:math:`e ← (1 - \tfrac1w)(e + δ)`, :math:`x = z - e`. Whatever else is done to the parameters in between is done to both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

#: The average is one over the last one in so many of all steps so far, and over so many at most.
PART, MOST = 20, 30.0


def window(steps: int) -> float:
    """Over about how many places the average goes, after so many steps; at first there is but one."""
    return min(max(steps / PART, 1.0), MOST)


def displace_(optimizer: Riemannian, p: Tensor, moved: Tensor) -> None:
    """Note that training has moved a parameter. One of low precision would not find its way back, and stays with it."""
    assert optimizer.auto is not None
    state = optimizer.state[p]
    if "ahead" in state:
        state["ahead"].add_(moved)
    elif optimizer.averaged and window(optimizer.auto.steps + 1) > 1 and p.dtype == moved.dtype:
        state["ahead"] = moved.clone()


def lead_(optimizer: Riemannian) -> None:
    """Move ahead to where training is, :math:`z = x + e`, unless that has been done.

    As ``data``: graphs of the parameters at rest (a penalty on weights, say) may be waiting for the same backward pass.
    """
    report = optimizer.auto
    if report is not None and not report.ahead:
        parameters, ways = _apart(optimizer)
        if parameters:
            torch._foreach_add_(parameters, ways)
        report.ahead = True


def settle_(optimizer: Riemannian, taken: bool) -> None:
    """Come to rest, :math:`x = z - e`; nearer to where training is if a step was taken."""
    report = optimizer.auto
    if report is not None and report.ahead:
        parameters, ways = _apart(optimizer)
        if parameters and taken:
            torch._foreach_mul_(ways, 1 - 1 / window(report.steps))
        if parameters:
            torch._foreach_sub_(parameters, ways)
        report.ahead = False


def _apart(optimizer: Riemannian) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters for which the two places differ, and by how much; what is frozen stays where it is."""
    found = ((p, optimizer.state.get(p, {}).get("ahead")) for p in optimizer._group)
    pairs = [(p.data, way) for p, way in found if way is not None and p.requires_grad]
    return [p for p, _ in pairs], [way for _, way in pairs]
