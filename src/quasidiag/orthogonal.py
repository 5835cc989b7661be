r"""Steps of equal strength in all directions: the gradient with its singular values made one.

The metric knows nothing of correlations between inputs or between units. A layer's averaged gradient does: in the
coordinates of the metric (:mod:`quasidiag.root`) it is a matrix :math:`U = P Σ Q^⊤`, units by inputs, and a few strong
singular directions hold nearly all of it. The step takes the orthogonal factor :math:`P Q^⊤` in its place, as Muon does in
the coordinates of the weights. This breaks no invariance: :math:`U` does not depend on the encoding.

A unit's step has length one in the metric, on the average. Blocks that are no such matrix (norms, embeddings, sparse
layers) are brought to the same length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quasidiag.blocks import DiagonalBlock, State

#: Of the quintic :math:`a x + b x^3 + c x^5` that drives singular values to one (Jordan et al. 2024, *Muon*).
QUINTIC = 3.4445, -4.7750, 2.0315
ITERATIONS = 5

Pair = tuple[list[Tensor], list[Tensor]]


def newton_schulz(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    r"""About :math:`P Q^⊤` for :math:`P Σ Q^⊤`: singular values between 0.7 and 1.2, those of rounding aside.

    .. math:: X ← aX + (b X X^⊤ + c (X X^⊤)^2) X, \qquad X_0 = U/‖U‖.

    On a GPU in bfloat16, which is exact enough for a direction.
    """
    a, b, c = QUINTIC
    half = matrix.is_cuda and matrix.dtype == torch.float32
    x = matrix.bfloat16() if half else matrix
    x = x.T if len(x) > x.shape[1] else x
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax().clamp_min(tiny)  # or the squares of a gradient that has faded underflow
    x = x / x.norm().clamp_min(tiny)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.T if len(matrix) > matrix.shape[1] else x
    return x.to(matrix.dtype)


def step(block: DiagonalBlock, state: State, gradients: list[Tensor]) -> Pair:
    r"""The step :math:`A^{-1} P Q^⊤` of a layer whose gradient has the coordinates :math:`P Σ Q^⊤`, and its image."""
    root = block.root(state)
    u = newton_schulz(root.gradient(block.rows_of(gradients)))
    u = u * math.sqrt(max(1.0, len(u) / u.shape[1]))
    return block.like(root.step(u)), block.like(root.image(u))


def of_length(step: Sequence[Tensor], gradients: Sequence[Tensor], units: int) -> Pair:
    r""":math:`d = M^{-1} v` brought to the length :math:`d^⊤ M d = \text{units}`, and its image."""
    length = torch.stack([torch.dot(w.flatten(), v.flatten()) for w, v in zip(step, gradients)])
    scale = (units / length.sum().clamp_min(torch.finfo(length.dtype).tiny)).sqrt()
    scale = torch.where(length.sum() > 0, scale, 0.0)
    return [w * scale for w in step], [v * scale for v in gradients]
