r"""The square root of a metric: coordinates in which a unit's block is the identity matrix.

The quasi-diagonal metric is a sum of squares,

.. math:: δ^⊤ M δ = m_{00} \Bigl(δ_0 + \sum_i μ_i δ_i\Bigr)^2 + \sum_i σ_i^2 δ_i^2, \qquad
          μ_i = \frac{m_{0i}}{m_{00}}, \quad σ_i^2 = m_{ii} - μ_i m_{0i},

so that :math:`M = A^⊤ A` with a sparse :math:`A`. A gradient has the coordinates :math:`A^{-⊤} v`: those of inputs that are
centred and brought to variance one. They are the same however inputs and activities are encoded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quasidiag.reductions import varies


class Root(NamedTuple):
    """The :math:`A` of each unit of a layer. ``None`` is what a unit does not have: a bias, or a bias row."""

    #: :math:`\\sqrt{m_{00}}`, ``[units]``.
    bias: Tensor | None
    #: :math:`μ`, ``[units, inputs]``.
    mean: Tensor | None
    #: :math:`σ`, ``[units, inputs]``; 0 for an input that has never varied.
    deviation: Tensor

    def gradient(self, v: list[Tensor]) -> Tensor:
        r"""The coordinates of a gradient, :math:`A^{-⊤} v`, as ``[units, (1 +) inputs]``, the bias first."""
        vi = (
            v[-1]
            if self.mean is None
            else torch.addcmul(v[-1], self.mean, v[0].unsqueeze(1), value=-1)
        )
        vi = vi * _inverse(self.deviation)
        if self.bias is None:
            return vi
        return torch.cat([(v[0] * _inverse(self.bias)).unsqueeze(1), vi], dim=1)

    def step(self, u: Tensor) -> list[Tensor]:
        r"""The step with the coordinates ``u``, :math:`A^{-1} u`."""
        if self.bias is None:
            return [u * _inverse(self.deviation)]
        wi = u[:, 1:] * _inverse(self.deviation)
        w0 = u[:, 0] * _inverse(self.bias)
        return [w0 if self.mean is None else w0 - (self.mean * wi).sum(1), wi]

    def image(self, u: Tensor) -> list[Tensor]:
        r"""What the metric makes of that step, :math:`M A^{-1} u = A^⊤ u`."""
        if self.bias is None:
            return [u * self.deviation]
        v0, vi = u[:, 0] * self.bias, u[:, 1:] * self.deviation
        return [v0, vi if self.mean is None else torch.addcmul(vi, self.mean, v0.unsqueeze(1))]


def quasi_diagonal(m00: Tensor, m0i: Tensor, mii: Tensor, shift: Tensor | None) -> Root:
    """Of moments that were measured from ``shift`` (see :func:`quasidiag.reductions.quasi_diagonal`)."""
    mean = m0i * _inverse(m00).unsqueeze(1)
    variance = torch.addcmul(mii, mean, m0i, value=-1)
    variance = torch.where(varies(m00, mii, variance, mii, shift), variance, 0.0)
    return Root(m00.sqrt(), mean if shift is None else mean + shift, variance.sqrt_())


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.reciprocal(), 0.0)
