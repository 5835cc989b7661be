"""What the last steps did: the numbers that one automatic step leaves to the next."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

#: Averages go over about ``STEPS`` steps. While their changes of the loss add up to a rise, each step multiplies the
#: damping by one of ``RISES``: the first where minibatches have their curvature in common, else the second.
STEPS, RISES = 50, (1.2, 2.0)
#: The echo at which curvature begins to count as common to all minibatches, and at which it does in full.
ECHOES = -0.1, -0.3
#: The factor of the first step, and the number of steps until it has risen to 1: long first steps lead to where the loss is
#: sharply curved, and all that follow must be short.
FIRST, WARM_UP = 0.5, 40
#: The weight of a new echo in its average, its largest size, and the ``extent`` above which a step has an echo.
ECHO, LOUDEST, WHOLE = 0.2, 2.0, 0.7
#: A minibatch's loss is a surprise if it is above the average of the last ones by ``SURPRISE`` standard deviations;
#: ``RECENT`` is the weight of a new loss in that average.
RECENT, SURPRISE = 0.1, 2.0
#: If more than ``OTHER`` of what steps promise is another loss's than the criterion's, the slope along the last steps is
#: looked at in each step: the judge does not see that loss. ``MIXED`` is the weight of a new measurement in that average.
OTHER, MIXED = 0.2, 0.2
#: What is found out about the samples of a model, once.
FOUND = "looked", "divisible", "apart"


@dataclass
class Report:
    r"""What the last steps did; a measured step is one whose length was computed from the quadratic model.

    Attributes:
        alpha: Length of the last step along its direction, with its factor.
        other: Length of the last step along the direction of the parameters outside every known layer.
        own: Part of their natural step that the criterion's own parameters took in the last step.
        damping: The damping :math:`λ` of the quadratic model.
        predicted: Change of the loss that the undamped model predicted for the last measured step.
        promise: Decrease of the damped model by the last measured step, at a factor of 1.
        hope: Average of the logarithm of ``promise``.
        unbounded: Decrease that the undamped model would promise if the loss could fall below its least value.
        besides: Part of ``unbounded`` that is another loss's (a penalty's): the gradient's slope beyond the criterion's own.
        mixture: Average of ``besides`` over ``unbounded``.
        mixture_variance: Variance of that ratio.
        grasp: Average logarithm of ``unbounded`` relative to what the loss could fall; less for small minibatches.
        stride: Number of steps since the last measurement, the measured one included.
        actual: Change of the loss over the steps that were judged last, on the minibatch after them.
        ratio: Ratio of ``actual`` to the change predicted for these steps.
        trend: Sum of all ``actual`` so far, older ones counting less; while it is positive the damping grows.
        extent: Length of the last measured step relative to the undamped one at a factor of 1.
        echo: Average part of the slope along a measured step that the next minibatch still finds; negative after too long a
            step.
        bounce: Average height of the loss above that at the averaged parameters, relative to what it could fall from there.
        bounces: Number of times that the bounce was measured.
        longer: Logarithm of the factor by which steps may be longer because the bounce is small.
        length: Squared length :math:`δ^⊤ M δ` of the last measured step in the metric; 0 after steps were undone.
        curvature: Curvature :math:`δ^⊤ F δ / δ^⊤ M δ` of the loss along the last measured step, weight decay included; more
            where the loss's least value or a trial made the step shorter.
        bare: That curvature before it is made more.
        usual: Average of the curvatures as measured, outliers cut, to which the bounds of the damping are relative.
        steps: Number of steps taken so far; a call of ``step()`` that only undoes others is none.
        retreats: Number of times that steps were undone.
        factor: What the last step was multiplied by: the largest ``lr``, less at first and for small minibatches, more where
            minibatches agree.
        small: Part of ``factor`` for the size of the minibatch: 1 unless it is a small one.
        samples: Number of samples in the last minibatch, averaged over ranks.
        data: Fingerprint of the last minibatch's data; 0 if it was not a small one.
        level: Running average of the minibatches' losses.
        spread: Running variance of the minibatches' losses.
        losses: Number of losses in ``level`` and ``spread``.
        doubt: Whether a trial shortened the last measured step, or none was measured yet: the next one is tried.
        proven: Number of measured steps to come that are not tried though they promise much, because the last one kept its
            promise.
        trust: Average part of the model's undamped step that trials leave; the next one begins with no more.
        steady: Whether the next step may reuse the coefficients of the last measured one.
        coefficients: Coefficient of each direction in the last measured step, at a factor of 1.
        slopes: Slope of the loss along each direction of the last measured step.
        parts: The ``lr`` of each param group at the last measured step, relative to the largest.
        decays: Weight decay of each param group in the last measured step.
        footing: Mean :math:`ρ^2` of all layers when it was first measured: how much their weights count.
        strengths: Logarithm of each layer's :math:`ρ` relative to the mean of all; ``None`` until it moves.
        falls: Change of the loss that the slope alone predicts for each layer's part of the last measured step; at the end,
            that of the parameters outside every layer.
        echoes: Average echo of each layer: the part of ``falls`` that the next minibatch still finds.
        further: Logarithm of how much further each layer goes because of its echo.
        proportions: Factor of each layer's direction, by its weights, its units and its echo.
        shortened: What each layer's direction was divided by in the last measured step, because it went too far; empty if no
            layer's did.
        forms: Averages of :math:`u^⊤Fv / \sqrt{u^⊤Mu\; v^⊤Mv}`, by the names of the directions :math:`u` and :math:`v`.
        looked: Whether it was tried to run the model on a part of the samples.
        divisible: Whether it can be.
        apart: Whether these then have the outputs that they have among all, in training mode.
    """

    alpha: float = 0.0
    other: float = 0.0
    own: float = 0.0
    damping: float = 0.0
    predicted: float = 0.0
    promise: float = 0.0
    hope: float = 0.0
    unbounded: float = 0.0
    besides: float = 0.0
    mixture: float = 0.0
    mixture_variance: float = 0.0
    grasp: float = 0.0
    stride: int = 0
    actual: float = float("nan")
    ratio: float = float("nan")
    trend: float = 0.0
    extent: float = 0.0
    echo: float = 0.0
    bounce: float = 0.0
    bounces: int = 0
    longer: float = 0.0
    length: float = 0.0
    curvature: float = 0.0
    bare: float = 0.0
    usual: float = 0.0
    steps: int = 0
    retreats: int = 0
    factor: float = 1.0
    small: float = 1.0
    samples: float = 0.0
    data: float = float("nan")
    level: float = 0.0
    spread: float = 0.0
    losses: int = 0
    doubt: bool = True
    proven: int = 0
    trust: float = 1.0
    steady: bool = False
    coefficients: dict[str, float] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    parts: list[float] = field(default_factory=list)
    decays: list[float] = field(default_factory=list)
    footing: float = 0.0
    strengths: list[float | None] = field(default_factory=list)
    falls: list[float] = field(default_factory=list)
    echoes: list[float] = field(default_factory=list)
    further: list[float] = field(default_factory=list)
    proportions: list[float] = field(default_factory=list)
    shortened: list[float] = field(default_factory=list)
    forms: dict[str, float] = field(default_factory=dict)
    looked: bool = False
    divisible: bool = False
    apart: bool = False

    def restore(self, before: Report) -> None:
        """Go back to ``before``, but for what was found out about the model's samples, which takes several passes."""
        vars(self).update({key: x for key, x in vars(before).items() if key not in FOUND})

    def written(self) -> str:
        """The report as one line of JSON: checkpoints keep a string as it is."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(line: str | None) -> dict[str, Any]:
        """The report's attributes, from a line by :meth:`written`."""
        found: dict[str, Any] = json.loads(line or "{}")
        return found

    @property
    def damped(self) -> float:
        """The part of the undamped step that the damping leaves."""
        whole = self.curvature + self.damping
        return self.curvature / whole if whole > 0 else 1.0

    @property
    def fall(self) -> float:
        """The change of the loss that the slope alone predicts for the last measured step."""
        return sum(self.falls)

    @property
    def warmth(self) -> float:
        """What the next step is multiplied by because it is one of the first."""
        return min(1.0, FIRST + (1 - FIRST) * self.steps / WARM_UP)

    @property
    def fresh(self) -> float:
        """The weight of a new measurement in the averages, which begin with the first one."""
        return 1 / min(self.steps + 1, STEPS) if self.usual else 1.0

    @property
    def common(self) -> float:
        """How far minibatches have in common the curvature that makes steps short: from 0, each has its own, to 1."""
        first, certain = ECHOES
        return min(max((self.echo - first) / (certain - first), 0.0), 1.0)

    @property
    def mixed(self) -> bool:
        """Whether a considerable part of what steps promise is another loss's than the criterion's, and not noise."""
        return self.mixture > max(OTHER, math.sqrt(self.mixture_variance))

    @property
    def rise(self) -> float:
        """What each step multiplies the damping by while the loss rises."""
        common, own = RISES
        return own * (common / own) ** self.common

    @property
    def listens(self) -> bool:
        """Whether the last step, a measured one, may have an echo: short steps and the first ones tell nothing."""
        return self.steps > WARM_UP and self.fall < 0 and self.extent > WHOLE

    def heard(self, slope: float) -> None:
        """Take the slope that the next minibatch finds along a measured step into the average echo."""
        if math.isfinite(slope):
            echo = min(max(slope / self.fall, -LOUDEST), LOUDEST)
            self.echo += ECHO * (echo - self.echo)

    def mixes(self, part: float) -> None:
        """Take the part of a step's promise that is another loss's into its average and variance."""
        weight = max(MIXED, self.fresh)
        change = min(max(part, -1.0), 1.0) - self.mixture
        self.mixture += weight * change
        self.mixture_variance = (1 - weight) * (self.mixture_variance + weight * change**2)

    def surprised(self, loss: float) -> bool:
        """Whether this loss is a surprise: above the last ones by more than they differ. It then enters their average."""
        rise, most = loss - self.level, SURPRISE * math.sqrt(self.spread)
        known = self.losses * RECENT > 0.5 and self.spread > 0
        surprise = not rise <= most and (known or not math.isfinite(rise))
        if math.isfinite(rise):
            rise = min(rise, 2 * most) if surprise else rise  # outliers count for less
            weight = max(1 / (self.losses + 1), RECENT)
            self.level += weight * rise
            self.spread += weight * ((rise**2 if self.losses else 0.0) - self.spread)
            self.losses += 1
        return surprise
