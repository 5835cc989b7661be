r"""The moments of a unit: the only numbers that the metric keeps.

With ``a`` a layer's inputs and ``delta`` the derivative of one sample's loss with respect to its pre-activations, and
‹·› the mean over samples,

.. math:: m_{00} = ‹δ^2› \qquad m_{0i} = ‹δ^2 a_i› \qquad m_{ii} = ‹δ^2 a_i^2›.

Written with the weights :math:`w = δ^2` they are a layer's own parameter gradients at the inputs ``a`` and ``a²``, so
per-sample gradients are never built. Nothing here knows of losses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

#: The types of plain tensors, unlike ``DTensor`` and other subclasses.
PLAIN = (Tensor, nn.Parameter)


class Moments(NamedTuple):
    """The moments of a layer's units: ``m00`` one per unit, ``m0i`` and ``mii`` in the weight's own shape.

    ``m00`` is ``None`` without a bias, ``m0i`` without a bias row, ``mii`` without a weight.
    """

    m00: Tensor | None
    m0i: Tensor | None
    mii: Tensor | None


def linear(a: Tensor, w: Tensor) -> Moments:
    """Moments of a dense layer summed over the rows of ``a: [rows, in]`` under the weights ``w: [rows, out]``."""
    return Moments(w.sum(0), w.T @ a, w.T @ a.square())


def recentre(moments: Moments, move: Tensor) -> Moments:
    r"""The moments of :math:`a - \text{move}` from those of ``a``.

    .. math:: m_{0i} → m_{0i} - c_i m_{00}, \qquad m_{ii} → m_{ii} - 2 c_i m_{0i} + c_i^2 m_{00}.
    """
    m00, m0i, mii = moments
    assert m00 is not None and m0i is not None and mii is not None
    column = m00.unsqueeze(-1)
    return Moments(m00, m0i - move * column, (mii - 2 * move * m0i).addcmul(move.square(), column))


def square(delta: Tensor, dtype: torch.dtype) -> Tensor:
    """``delta²`` in the precision ``dtype``, with what would be denormal set to zero.

    A denormal float slows a CPU down about tenfold, in every product that it enters.
    """
    w = delta.to(dtype).square()
    return torch.where(w < smallest(dtype), 0.0, w)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without the call if ``x`` has that dtype: with small layers a step's time goes into calls."""
    return x if x.dtype is dtype else x.to(dtype)


def smallest(dtype: torch.dtype) -> float:
    """Moments below this count as zero; it is large enough that products with the remaining ones are not denormal."""
    return torch.finfo(dtype).tiny * 2.0**24


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast: the metric is kept and inverted in its own precision."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def with_precision(
    m00: Tensor,
    m0i: Tensor,
    mii: Tensor,
    shift: Tensor | None,
    e0: Tensor | float,
    ei: Tensor | float,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The moments of a metric with :math:`e_0` and :math:`e_i` added to the diagonal of its bias and its weights.

    In moments with the shift *c* that of the bias is :math:`e_0 (1, -c)(1, -c)^⊤`.
    """
    if shift is None:
        return m00 + e0, m0i, mii + ei
    return m00 + e0, m0i - e0 * shift, mii + (ei + e0 * shift.square())
