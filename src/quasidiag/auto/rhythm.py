"""How often the metric is updated and the quadratic model measured.

In each of the first steps, while the network changes quickly, then in every few. Where each minibatch has a curvature of its
own, a measurement says little about the steps that follow it: later in training it is made more seldom there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

#: Metric and model are measured in each of so many first steps.
AT_FIRST = 4
#: Then the model is measured every ``MODEL`` steps and the metric every ``METRIC``, unless the optimizer was told otherwise.
MODEL, METRIC = 6, 8
#: From step ``LATER`` on, they are measured so many times as seldom (the model and the metric) where ``report.common`` is
#: less than a half. It stays 0 where minibatches are too small to tell, or steps too long or too short by their ``lr``.
LATER, SELDOM = 100, (3, 2)


def step_every(optimizer: Riemannian) -> int:
    """The number of steps from one measurement of the model to the next."""
    given = optimizer.step_every
    return given or MODEL * _times(optimizer, SELDOM[0])


def metric_every(optimizer: Riemannian) -> int:
    """The number of steps from one update of the metric to the next."""
    given = optimizer.metric_every
    return given or METRIC * _times(optimizer, SELDOM[1])


def weight(optimizer: Riemannian, gamma: float) -> float:
    """The weight of a new minibatch in the metric, so that it looks back over as many steps however seldom it is updated."""
    return gamma if optimizer.metric_every else 1 - (1 - gamma) ** _times(optimizer, SELDOM[1])


def metric_due(optimizer: Riemannian) -> bool:
    """Whether the next step is to update the metric. A retreat does not count as a step."""
    steps = optimizer.steps if optimizer.auto is None else optimizer.auto.steps
    early = optimizer.auto is not None and steps < AT_FIRST
    return early or steps % metric_every(optimizer) == 0


def _times(optimizer: Riemannian, seldom: int) -> int:
    report = optimizer.auto
    assert report is not None
    return seldom if report.steps >= LATER and report.common < 0.5 else 1
