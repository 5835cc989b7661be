r"""Longer steps, where the average at rest makes up for them.

Steps that cross a valley end above its bottom, and the place at rest, an average of where they led
(:mod:`quasidiag.auto.rest`), lies lower. By how much, relative to the loss there, is what crossing costs, the bounce:

.. math:: b = \frac{ℓ(z) - ℓ(x)}{ℓ(x) - ℓ_{\min}} .

Data with little noise of their own have next to none. What makes steps short there is a valley that all minibatches agree
on, and along its bottom longer ones would get further. So where minibatches have their curvature in common, steps get
longer as long as the bounce is small, and shorter again where it is not; the damping, which would shorten them, is bounded
by that much less.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from quasidiag.auto import rest

if TYPE_CHECKING:
    from quasidiag.auto.quadratic import QuadraticModel
    from quasidiag.auto.report import Report
    from quasidiag.optimizer import Riemannian

#: Twice the step of a parabola leads to the same height on the other side.
TWICE = 2.0
#: A bounce of less than this is small.
SMALL = 0.03
#: So much does the logarithm of the factor grow at once, where there is none. How much of its average a new bounce is.
GROWTH, NEW = 0.2, 0.2
#: It is asked for in every so many measured steps, since it takes a forward pass, and from so many on.
EVERY, LATER = 2, 100


def ask(optimizer: Riemannian, model: QuadraticModel, ranks: Any) -> None:
    """Before a step that is measured: where training is, against the place at rest."""
    report = model.report
    turn = report.steps >= LATER and report.steps // optimizer.step_every % EVERY == 0
    if turn and report.common == 1:
        bounce = model.above(rest.places(optimizer), ranks)
        if math.isfinite(bounce):
            lengthen(report, bounce)


def lengthen(report: Report, bounce: float) -> None:
    """Take a bounce into its average, and let the next steps be longer or shorter for it."""
    report.bounces += 1
    report.bounce += max(NEW, 1 / report.bounces) * (bounce - report.bounce)
    growth = GROWTH * min(max(1 - report.bounce / SMALL, -1.0), 1.0)
    report.longer = min(max(report.longer + growth, 0.0), math.log(TWICE))
