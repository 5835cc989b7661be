"""What the last steps did: the numbers that one step of the automatic kind leaves to the next."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Averages go over about so many steps. While what they did to the loss adds up to a rise, the damping grows by a factor a
#: step: the first where minibatches have their curvature in common, else the second.
STEPS, RISES = 50, (1.2, 2.0)
#: That they have it in common is what the echo tells, from the first of these on, and for certain at the second.
ECHOES = -0.1, -0.3
#: The first step is so much shorter, and so many later none is: long first steps lead to where the loss is sharply
#: curved, and all that follow must be short.
FIRST, WARM_UP = 0.5, 40
#: How much of its average a new echo is, and how large it may be; how much of a step it takes to be heard.
ECHO, LOUDEST, WHOLE = 0.2, 2.0, 0.7
#: A minibatch's loss is a surprise if it is above the average of the last ones (each new one counts so much) by so many
#: of their standard deviations.
RECENT, SURPRISE = 0.1, 2.0


@dataclass
class Report:
    r"""What the last steps did; a measured step is one whose length was computed from the quadratic model.

    Attributes:
        alpha: Length of the last step along its direction, with its factor.
        other: Length of the last step along the direction of the parameters that are in no block.
        own: Part of their natural step that the criterion's own parameters took in the last step.
        damping: The damping :math:`λ` of the quadratic model.
        predicted: Change of the loss that the undamped model predicted for the last measured step.
        promise: Decrease of the damped model by the last measured step, at a factor of 1.
        hope: Average of the logarithm of ``promise``.
        unbounded: Decrease that the undamped model would promise if the loss could fall below its least value.
        besides: The part of it that is not the criterion's, whose slope is less than the gradient's; about 0 if none is.
        grasp: Average of the logarithm of ``unbounded``, relative to what the loss could fall; less for small minibatches.
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
        curvature: Curvature :math:`δ^⊤ F δ / δ^⊤ M δ` of the loss along the last measured step.
        usual: Average of these curvatures, to which the bounds of the damping are relative.
        steps: Number of steps taken so far; a call of ``step()`` that only undoes others is none.
        retreats: Number of times that steps were undone.
        factor: What the last step was multiplied by: the largest ``lr``, less at first and for small minibatches.
        small: What the last step was multiplied by because its minibatch is a small one.
        samples: Number of samples in the last minibatch, averaged over ranks.
        data: Fingerprint of the last minibatch's data; 0 if it was not a small one.
        level: Running average of the minibatches' losses.
        spread: Running variance of the minibatches' losses.
        losses: Number of losses in ``level`` and ``spread``.
        doubt: Whether the last step that was tried did not keep its promise, or none was tried: the next one is.
        steady: Whether the next step may reuse the coefficients of the last measured one.
        coefficients: Coefficient of each direction in the last measured step, at a factor of 1.
        slopes: Slope of the loss along each direction of the last measured step.
        parts: The ``lr`` of each param group at the last measured step, relative to the largest.
        footing: Mean :math:`ρ^2` of all layers when it was first measured: how much their weights count.
        strengths: Logarithm of each layer's :math:`ρ` relative to the mean of all; ``None`` until it moves.
        falls: Change of the loss that the slope alone predicts for each layer's part of the last measured step.
        echoes: Average echo of each layer: the part of ``falls`` that the next minibatch still finds.
        further: Logarithm of how much further each layer goes because of its echo.
        proportions: Factor of each layer's direction, by its weights, its units and its echo.
        forms: Averages of :math:`u^⊤Fv / \sqrt{u^⊤Mu\; v^⊤Mv}`, by the names of the directions :math:`u` and :math:`v`.
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
    steady: bool = False
    coefficients: dict[str, float] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    parts: list[float] = field(default_factory=list)
    footing: float = 0.0
    strengths: list[float | None] = field(default_factory=list)
    falls: list[float] = field(default_factory=list)
    echoes: list[float] = field(default_factory=list)
    further: list[float] = field(default_factory=list)
    proportions: list[float] = field(default_factory=list)
    forms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def saved(cls, kept: Mapping[str, Any]) -> Report:
        """From what a ``state_dict`` has of it, which may be of another version."""
        report = cls(**{key: kept[key] for key in vars(cls()) if key in kept})
        if "hope" not in kept and report.promise > 0:
            report.hope = math.log(report.promise)
        if "stride" not in kept and report.promise > 0:
            report.stride = 1
        if "proportions" not in kept:
            report.steady = False  # its directions were of other lengths
        if not all(map(math.isfinite, report.forms.values())):
            report.forms = {}
        return report

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """A pickled one may be of another version too."""
        vars(self).update(vars(Report.saved(kept)))

    def written(self) -> str:
        """As one line, which a checkpoint keeps whole."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(line: str | None) -> dict[str, Any]:
        """What :meth:`saved` wants, from such a line."""
        found: dict[str, Any] = json.loads(line or "{}")
        return found

    @property
    def damped(self) -> float:
        """How much of the step without damping is left with it."""
        whole = self.curvature + self.damping
        return self.curvature / whole if whole > 0 else 1.0

    @property
    def fall(self) -> float:
        """The change of the loss that the last measured step was to bring, by the slope alone."""
        return sum(self.falls)

    @property
    def warmth(self) -> float:
        """What the next step is multiplied by because it is one of the first."""
        return min(1.0, FIRST + (1 - FIRST) * self.steps / WARM_UP)

    @property
    def fresh(self) -> float:
        """How much of its averages a measurement is. They begin with the first one that there is."""
        return 1 / min(self.steps + 1, STEPS) if self.usual else 1.0

    @property
    def common(self) -> float:
        """How far minibatches have in common what makes steps short: from 0, each its own curvature, to 1."""
        first, certain = ECHOES
        return min(max((self.echo - first) / (certain - first), 0.0), 1.0)

    @property
    def rise(self) -> float:
        """What the damping grows by in a step, while the loss rises."""
        common, own = RISES
        return own * (common / own) ** self.common

    @property
    def listens(self) -> bool:
        """Whether the last step, which was measured, may have an echo: short steps and the first ones tell nothing."""
        return self.steps > WARM_UP and self.fall < 0 and self.extent > WHOLE

    def heard(self, slope: float) -> None:
        """The slope along a measured step, as the next minibatch finds it."""
        if math.isfinite(slope):
            echo = min(max(slope / self.fall, -LOUDEST), LOUDEST)
            self.echo += ECHO * (echo - self.echo)

    def surprised(self, loss: float) -> bool:
        """Whether this loss is higher than the last minibatches', by more than they differ. It is then one of them."""
        rise, most = loss - self.level, SURPRISE * math.sqrt(self.spread)
        known = self.losses * RECENT > 0.5 and self.spread > 0
        surprise = not rise <= most and (known or not math.isfinite(rise))
        if math.isfinite(rise):
            rise = min(rise, 2 * most) if surprise else rise  # an outlier is not the new usual
            weight = max(1 / (self.losses + 1), RECENT)
            self.level += weight * rise
            self.spread += weight * ((rise**2 if self.losses else 0.0) - self.spread)
            self.losses += 1
        return surprise
