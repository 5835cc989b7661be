r"""The damped quadratic model along a few directions, as numbers: slopes, forms, and the coefficients that minimise it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

#: Added to the diagonal of the (scaled) system for the coefficients: directions may do the same to the outputs.
RIDGE = 1e-6

#: A few numbers in float64: for so few, numpy has less overhead than torch.
Array = npt.NDArray[np.float64]


def minimiser(linear: Array, quadratic: Array) -> Array:
    r"""The coefficients *c* that minimise :math:`c·\text{linear} + \tfrac12 c^⊤ \text{quadratic}\, c`.

    Zero where the system has no finite solution, and for a direction without curvature, along which there is no minimum. A
    single equation, the usual case, is solved without LAPACK.
    """
    diagonal = quadratic.diagonal()
    scale = np.where(diagonal < np.finfo(np.float64).tiny, np.inf, diagonal) ** -0.5
    right = scale * linear
    if len(linear) == 1:
        best: Array = -scale * (right / (quadratic[0] * scale * scale + RIDGE))
        return best if np.isfinite(best[0]) else np.zeros_like(linear)
    system = quadratic * scale * scale[:, None] + RIDGE * np.eye(len(linear))
    try:
        best = -scale * np.linalg.solve(system, right)
    except np.linalg.LinAlgError:
        return np.zeros_like(linear)
    return best if np.isfinite(best).all() else np.zeros_like(linear)


@dataclass(frozen=True, eq=False)
class Parabola:
    r"""The model :math:`c·s + \tfrac12 c^⊤ (F + λM)\, c` of the coefficients :math:`c`.

    ``slopes`` are :math:`s`, ``curved`` is :math:`F`, ``damping`` is :math:`λM`. The step that is taken is ``factors``
    times the coefficients that minimise it.
    """

    slopes: Array
    curved: Array
    damping: Array
    factors: Array

    def steeper(self, part: float) -> Parabola:
        """The model whose undamped step is ``part`` of this one's."""
        return replace(self, curved=self.curved / part)

    @cached_property
    def best(self) -> Array:
        """The coefficients that minimise it; 0 for a direction that would have to be followed uphill."""
        curved = self.curved + self.damping
        found = minimiser(self.slopes, curved)
        down = found * self.slopes <= 0
        if down.all():
            return found
        best = np.zeros_like(found)
        best[down] = minimiser(self.slopes[down], curved[np.ix_(down, down)])
        return best

    @cached_property
    def step(self) -> Array:
        """The coefficients of the step that is taken."""
        return self.factors * self.best

    def change(self, step: Array) -> float:
        """The change of the loss that the undamped model predicts for a step."""
        return float(self.slopes @ step + 0.5 * step @ self.curved @ step)
