r"""Longer steps where the averaged parameters make up for them.

Steps that cross a valley end above its bottom, at :math:`z`; the averaged parameters :math:`x`
(:mod:`quasidiag.auto.rest`) lie lower. How much lower, relative to what the loss could still fall, is what crossing costs,
the bounce:

.. math:: b = \frac{ℓ(z) - ℓ(x)}{ℓ(x) - ℓ_{\min}} .

Data with little noise of their own have next to none. There, steps are short because of a valley that all minibatches
share, and longer ones would get further along its bottom. So where minibatches have their curvature in common, steps get
longer while the bounce is small, and shorter again where it is not. The upper bound on the damping, which would shorten
them, is lowered accordingly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from quasidiag.auto import rest, rhythm

if TYPE_CHECKING:
    from quasidiag.auto.quadratic import QuadraticModel
    from quasidiag.auto.report import Report
    from quasidiag.optimizer import Riemannian

#: Steps get longer by up to this factor: twice the step of a parabola leads to the same height on the other side.
TWICE = 2.0
#: A bounce of less than this is small.
SMALL = 0.03
#: The logarithm of the factor grows by ``GROWTH`` at once where there is no bounce. ``NEW``: weight of a new bounce.
GROWTH, NEW = 0.2, 0.2
#: The bounce takes a forward pass: it is measured in one of ``EVERY`` measured steps, from step ``LATER`` on.
EVERY, LATER = 2, 100


def ask(optimizer: Riemannian, model: QuadraticModel, ranks: Any) -> None:
    """Before a measured step: measure the bounce if it is time for that and minibatches have their curvature in common."""
    report = model.report
    turn = report.steps >= LATER and report.steps // rhythm.step_every(optimizer) % EVERY == 0
    if turn and report.common == 1:
        bounce = model.above(rest.places(optimizer), ranks)
        if math.isfinite(bounce):
            lengthen(report, bounce)


def lengthen(report: Report, bounce: float) -> None:
    """Take a bounce into its average, and make the next steps longer or shorter accordingly."""
    report.bounces += 1
    report.bounce += max(NEW, 1 / report.bounces) * (bounce - report.bounce)
    growth = GROWTH * min(max(1 - report.bounce / SMALL, -1.0), 1.0)
    report.longer = min(max(report.longer + growth, 0.0), math.log(TWICE))
