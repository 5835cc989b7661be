r"""How a unit's block of the metric is completed and inverted (Algorithm 1 of the paper).

A *unit* is one output neuron, its *block* holds its bias first and then its incoming weights. Nothing here knows of
networks: every function takes the numbers of one or many blocks and gives the Riemannian gradient of the block,

.. math:: w = M^{-1} v.

=================  =====================================================================================
diagonal           :math:`w_i = v_i / (m_{ii} + ε)`
quasi-diagonal     inverse of the completion :math:`M_{ij} = m_{0i} m_{0j} / m_{00}`, :func:`quasi_diagonal`
unitwise           the full block, the reference that the other two approximate
=================  =====================================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor


def qd_rank_one_update(
    diagonal: Tensor, row: Tensor, v: Tensor, alpha: float | Tensor
) -> tuple[Tensor, Tensor]:
    r"""``QDRankOneUpdate``: the quasi-diagonal part of :math:`M + α v v^⊤`.

    Args:
        diagonal: :math:`M_{ii}`, shape ``[..., 1 + n]``, the bias (entry 0) first.
        row: the bias row :math:`M_{0i}`, shape ``[..., n]``.
        v: the vectors, shape ``[..., 1 + n]``.
        alpha: the weight :math:`α`.

    Returns:
        The new ``(diagonal, row)``.
    """
    return diagonal + alpha * v.square(), row + alpha * v[..., :1] * v[..., 1:]


def qd_solve(
    diagonal: Tensor, row: Tensor, v: Tensor, eps: float = 1e-8, floor: float | None = None
) -> Tensor:
    r"""``QDSolve``: :math:`w = M^{-1} v` for any number of blocks, each with its first entry as the bias.

    With :math:`Δ = \text{diagonal} + ε` and :math:`r = \text{row}`,

    .. math::
        w_i = \frac{Δ_0 v_i - r_i v_0}{\max(Δ_i Δ_0 - r_i^2, \text{floor})}, \qquad
        w_0 = \frac{v_0 - \sum_i r_i w_i}{Δ_0}.

    Args:
        diagonal: :math:`M_{ii}`, shape ``[..., 1 + n]``.
        row: :math:`M_{0i}`, shape ``[..., n]``.
        v: the gradient of the blocks, shape ``[..., 1 + n]``.
        eps: added to the diagonal.
        floor: bounds the denominator; ``None`` means ``eps`` as in the paper, ``0.0`` none.
    """
    w0, wi = quasi_diagonal(
        diagonal[..., 0], row, diagonal[..., 1:], v[..., 0], v[..., 1:], eps=eps, floor=floor
    )
    return torch.cat([w0.unsqueeze(-1), wi], dim=-1)


def quasi_diagonal(
    m00: Tensor,
    m0i: Tensor,
    mii: Tensor,
    v0: Tensor,
    vi: Tensor,
    *,
    eps: float = 1e-8,
    floor: float | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Algorithm 1 for blocks ``m00, v0: [...]`` and ``m0i, mii, vi: [..., n]``, in the centred form.

    Read as statistics: with :math:`μ_i = r_i/Δ_0` the mean of input *i* under the weight ``delta²`` and
    :math:`σ_i^2 = Δ_i - μ_i r_i` its variance times :math:`Δ_0`, the step is
    :math:`w_i = (v_i - μ_i v_0)/σ_i^2`. No product of two second moments is formed, so nothing underflows.

    ``shift`` is a point *c* from which the moments were measured (:math:`a - c` in place of :math:`a`). The result is
    the same as without it, for any ``eps``, because :math:`M + εI` is carried along:
    :math:`Δ_i → \tilde m_{ii} + ε(1 + c_i^2)`, :math:`r_i → \tilde m_{0i} - ε c_i`. An input that never left *c*
    gets no step.
    """
    floor = eps if floor is None else floor
    d0 = m00 + eps
    inverse0 = torch.where(d0 > 0, d0.reciprocal(), 0.0).unsqueeze(-1)
    v0_ = v0.unsqueeze(-1)
    if shift is None:
        row, diagonal, centred = m0i, mii + eps, vi
    else:
        row = m0i - eps * shift
        diagonal = mii + eps * (1 + shift.square())
        centred = vi - shift * v0_
    mu = row * inverse0
    variance = diagonal - mu * row
    wi = (centred - mu * v0_) / torch.maximum(variance, floor * inverse0)
    wi = torch.where(varies(m00, mii, variance, diagonal, shift), wi, 0.0)
    w0 = (v0 - (row * wi).sum(-1)) * inverse0.squeeze(-1)
    if shift is not None:
        w0 = w0 - (shift * wi).sum(-1)
    return w0, wi


def varies(
    m00: Tensor, mii: Tensor, variance: Tensor, diagonal: Tensor, shift: Tensor | None
) -> Tensor:
    """A mask of the inputs that have varied by more than rounding, so that there is a variance to divide by."""
    unit = 8 * torch.finfo(mii.dtype).eps
    alive = variance > unit * diagonal
    if shift is not None:
        alive = alive & (mii > m00.unsqueeze(-1) * (unit * shift).square())
    return alive


def safeguarded(
    m00: Tensor, m0i: Tensor, mii: Tensor, unit: float, layer: float, dead: float
) -> tuple[Tensor, Tensor]:
    r"""``m00: [..., units]`` and ``mii: [..., units, n]`` with bounds relative to their neighbours, for an untuned step.

    Each variance :math:`σ_i^2 = m_{ii} - m_{0i}^2/m_{00}` grows by ``unit`` times the mean over its unit and ``layer`` times
    the mean over the layer (for inputs that become active late), each ``m00`` by ``dead`` times the mean over the layer
    (for units that are hardly ever active). The result depends on the scales of single inputs, not on their offsets.
    """
    m00 = m00 + dead * m00.mean(-1, keepdim=True)
    inverse = torch.where(m00 > 0, m00.reciprocal(), 0.0).unsqueeze(-1)
    variance = torch.addcmul(mii, m0i * inverse, m0i, value=-1.0).clamp_min_(0.0).mean(-1)
    return m00, mii + (unit * variance + layer * variance.mean(-1, keepdim=True)).unsqueeze(-1)


def diagonal(m: Tensor, v: Tensor, *, eps: float = 1e-8, floor: float | None = None) -> Tensor:
    r"""The diagonal reduction, :math:`w_i = v_i / \max(m_{ii} + ε, \text{floor})`; 0 where the denominator is 0."""
    denominator = (m + eps).clamp_min(eps if floor is None else floor)
    return torch.where(denominator > 0, v / denominator, 0.0)


def unitwise(block: Tensor, v: Tensor, *, eps: float = 1e-8, floor: float | None = None) -> Tensor:
    r"""The full inverse of each block, :math:`w = (M + εI)^{-1} v`, ``block: [..., n, n]`` and ``v: [..., n]``.

    Eigenvalues are bounded below by ``floor``; a direction in which nothing varies gets no step.
    """
    values, vectors = torch.linalg.eigh(block)
    unit = block.shape[-1] * torch.finfo(block.dtype).eps
    denominator = (values + eps).clamp_min(eps if floor is None else floor)
    seen = denominator > unit * values[..., -1:]
    inverse = torch.where(seen, denominator.reciprocal(), 0.0)
    coordinates = (vectors.mT @ v.unsqueeze(-1)).squeeze(-1)
    return (vectors @ (inverse * coordinates).unsqueeze(-1)).squeeze(-1)
