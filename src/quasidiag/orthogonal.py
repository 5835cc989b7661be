r"""Steps of equal strength in all directions: the gradient with its singular values made one.

The metric knows nothing of correlations between inputs or between units. A layer's averaged gradient does: in the
coordinates of the metric (:mod:`quasidiag.root`) it is a matrix :math:`U = P Σ Q^⊤`, units by inputs, and a few strong
singular directions hold nearly all of it. The step takes the orthogonal factor :math:`P Q^⊤` in its place, as Muon does in
the coordinates of the weights. This breaks no invariance: :math:`U` does not depend on the encoding.

In a wide layer this is done for groups of units: the price is then that of some hundred samples more, however wide the
layer. A unit's step has length one in the metric, on the average. Blocks that are no such matrix (norms, embeddings,
sparse layers) are brought to the same length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from quasidiag.blocks import DiagonalBlock, State

#: Of the quintics :math:`a x + b x^3 + c x^5` that bring singular values to one, in turn: each is the best for the
#: interval that the last one leaves, and the first for 0.005 to 1 (Amsel et al. 2025, *The Polar Express*).
QUINTICS = (
    (8.2987034914, -24.4304981482, 18.0903041931),
    (3.9152209605, -2.9211302322, 0.5592232598),
    (3.1746036571, -2.3804328339, 0.4978263935),
    (2.1894628398, -1.5672206835, 0.4078871580),
)
#: For rounding: singular values begin below one over this.
MARGIN = 1.01
#: So many units of a wide layer are made orthogonal to each other; more would cost more, and bring nothing.
GROUP = 256

Pair = tuple[list[Tensor], list[Tensor]]


def newton_schulz(matrices: Tensor) -> Tensor:
    r"""About :math:`P Q^⊤` for every :math:`U = P Σ Q^⊤`.

    .. math:: X ← aX + (b X X^⊤ + c (X X^⊤)^2) X, \qquad X_0 = U/‖U‖.

    Singular values of more than 0.006 :math:`‖U‖` come within 9 % of one. On a GPU in bfloat16, which is exact enough
    for a direction.
    """
    half = matrices.is_cuda and matrices.dtype == torch.float32
    x = matrices.bfloat16() if half else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    tiny = torch.finfo(x.dtype).tiny
    # Twice, or the squares of a gradient that has faded underflow; and a little more, because the first quintic rises
    # steeply beyond one.
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).mul(MARGIN).clamp_min(tiny)
    for a, b, c in QUINTICS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def factor(u: Tensor) -> Tensor:
    """The orthogonal factor of ``u: [units, inputs]``, by groups of units where both are many.

    Units are of length one on the average.
    """
    units, inputs = u.shape
    groups = math.ceil(units / GROUP) if min(units, inputs) > GROUP else 1
    size = math.ceil(units / groups)
    padded = u if size * groups == units else F.pad(u, (0, 0, 0, size * groups - units))
    orthogonal = newton_schulz(padded.view(groups, size, inputs)).reshape(-1, inputs)[:units]
    return orthogonal * math.sqrt(units / inputs) if groups == 1 and units > inputs else orthogonal


def step(block: DiagonalBlock, state: State, gradients: list[Tensor]) -> Pair:
    r"""The step :math:`A^{-1} P Q^⊤` of a layer whose gradient has the coordinates :math:`P Σ Q^⊤`, and its image."""
    root = block.root(state)
    u = factor(root.gradient(block.rows_of(gradients)))
    return block.like(root.step(u)), block.like(root.image(u))


def of_length(step: Sequence[Tensor], gradients: Sequence[Tensor], units: int) -> Pair:
    r""":math:`d = M^{-1} v` brought to the length :math:`d^⊤ M d = \text{units}`, and its image."""
    length = torch.stack([torch.dot(w.flatten(), v.flatten()) for w, v in zip(step, gradients)])
    scale = (units / length.sum().clamp_min(torch.finfo(length.dtype).tiny)).sqrt()
    scale = torch.where(length.sum() > 0, scale, 0.0)
    return [w * scale for w in step], [v * scale for v in gradients]
