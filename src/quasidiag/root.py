r"""The square root of a metric: coordinates in which a unit's block is the identity matrix.

The quasi-diagonal metric is a sum of squares,

.. math:: δ^⊤ M δ = m_{00} \Bigl(δ_0 + \sum_i μ_i δ_i\Bigr)^2 + \sum_i σ_i^2 δ_i^2, \qquad
          μ_i = \frac{m_{0i}}{m_{00}}, \quad σ_i^2 = m_{ii} - μ_i m_{0i},

so that :math:`M = A^⊤ A` with a sparse :math:`A`. A gradient has the coordinates :math:`A^{-⊤} v`: the gradient for inputs
that are centred and scaled to variance one, which is the same however inputs and activities are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quasidiag import kernels
from quasidiag.reductions import safeguarded, varies


class Root(NamedTuple):
    """The :math:`A` of each unit, of one layer or several. ``bias`` and ``mean`` are ``None`` without a bias or a bias row.

    Inverses are kept, because every step needs them: 0 for a unit that was never active or an input that never varied.
    """

    #: :math:`1/\sqrt{m_{00}}`, ``[..., units]``.
    bias: Tensor | None
    #: :math:`μ`, ``[..., units, inputs]``.
    mean: Tensor | None
    #: :math:`1/σ`, ``[..., units, inputs]``.
    scale: Tensor

    def gradient(self, v: Sequence[Tensor]) -> Tensor:
        r"""The coordinates of a gradient, :math:`A^{-⊤} v`, as ``[..., units, (1 +) inputs]``, the bias first."""
        if self.bias is None:
            return v[-1] * self.scale
        u, u0, ui = self._room(v[-1])
        if self.mean is None:
            torch.mul(v[-1], self.scale, out=ui)
        else:
            torch.addcmul(v[-1], self.mean, v[0].unsqueeze(-1), value=-1, out=ui)
            ui.mul_(self.scale)
        torch.mul(v[0], self.bias, out=u0)
        return u

    def step(self, u: Tensor) -> list[Tensor]:
        r"""The step with the coordinates ``u``, :math:`A^{-1} u`."""
        if self.bias is None:
            return [u * self.scale]
        w0, wi = u[..., 0] * self.bias, u[..., 1:] * self.scale
        return [w0 if self.mean is None else w0 - _rows_dot(self.mean, wi), wi]

    def coordinates(self, w: Sequence[Tensor]) -> Tensor:
        r"""The coordinates of a step, :math:`A w`, whose norm is its length in the metric: :math:`w^⊤ M w = ‖A w‖^2`."""
        if self.bias is None:
            return w[-1] * _inverse(self.scale)
        u, u0, ui = self._room(w[-1])
        torch.mul(w[-1], _inverse(self.scale), out=ui)
        w0 = w[0] if self.mean is None else w[0] + _rows_dot(self.mean, w[-1])
        torch.mul(w0, _inverse(self.bias), out=u0)
        return u

    def lengths(self, w: Sequence[Tensor]) -> Tensor:
        r"""The squared length of a step in the metric, unit by unit: :math:`‖A w‖^2`, ``[..., units]``."""
        return self.coordinates(w).square().sum(-1)

    def of(self, layer: int) -> Root:
        """The root of one of several layers."""
        bias, mean, scale = self
        one = None if bias is None else bias[layer], None if mean is None else mean[layer]
        return Root(*one, scale[layer])

    @staticmethod
    def _room(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An empty tensor for coordinates, and the views of it that belong to the bias and to the inputs."""
        u = rows.new_empty(*rows.shape[:-1], 1 + rows.shape[-1])
        return u, u[..., 0], u[..., 1:]


def diagonal(m00: Tensor | None, mii: Tensor) -> Root:
    """The root of a diagonal metric."""
    return Root(None if m00 is None else _inverse(m00.sqrt()), None, _inverse(mii.sqrt()))


def quasi_diagonal(
    m00: Tensor,
    m0i: Tensor,
    mii: Tensor,
    shift: Tensor | None,
    bounds: tuple[float, float, float] | None = None,
) -> Root:
    """The root of a quasi-diagonal metric, from moments with a ``shift`` (see :func:`quasidiag.reductions.quasi_diagonal`).

    ``bounds`` are the last three arguments of :func:`quasidiag.reductions.safeguarded`, if it is to be applied.
    """
    found = kernels.root(m00, m0i, mii, shift, bounds)
    if found is not None:
        return Root(*found)
    if bounds is not None:
        m00, mii = safeguarded(m00, m0i, mii, *bounds)
    mean = m0i * _inverse(m00).unsqueeze(-1)
    variance = torch.addcmul(mii, mean, m0i, value=-1)
    variance = torch.where(varies(m00, mii, variance, mii, shift), variance, 0.0)
    mean = mean if shift is None else mean + shift
    return Root(_inverse(m00.sqrt()), mean, _inverse(variance.sqrt_()))


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.reciprocal(), 0.0)


def _rows_dot(x: Tensor, y: Tensor) -> Tensor:
    rows = [t.flatten(0, -2) for t in (x, y)]
    return torch.bmm(rows[0].unsqueeze(1), rows[1].unsqueeze(2)).view(x.shape[:-1])
