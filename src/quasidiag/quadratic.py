r"""The quadratic model of the loss along a few directions, and what came of the steps that it proposed.

.. math:: g^⊤ δ + \tfrac12 δ^⊤ (F + λ M) δ,

where :math:`F` is the Fisher matrix of the minibatch itself, no approximation: :math:`u^⊤ F v = ‹Ju, F_\text{out} Jv›`
needs the derivatives of the outputs along the directions only. The damping :math:`λ` rises while the loss does: steps are
judged on the next minibatch, which they have not seen, and those that did great harm there are taken back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from quasidiag import distributed
from quasidiag.directions import Direction, before_way, dots, mean
from quasidiag.outputs import OutputModel
from quasidiag.replay import Batch, Replay

#: How much of the average of the quadratic forms survives a measurement, which is that of a share of the minibatch.
FORMS = 0.5
#: That share is so large unless somebody says otherwise, and has no more terms than these; in any case as many as these
#: if there are as many.
SHARE, MOST, FEWEST = 0.5, 2048, 128
#: So many terms are enough to judge by, where there are twice as many.
JUDGES = 4096
#: What the steps did to the loss is summed up over about this many of them. While the sum is a rise the damping grows
#: by a factor a step, the first where minibatches have their curvature in common, else it falls by one.
STEPS, RISES, DECAY = 50, (1.2, 2.0), 0.95
#: Of the damping, relative to the curvature along the usual step. The upper one is the second where minibatches have
#: their curvature in common, and the third where they do not, or up to the fourth: where the model promises less than
#: this of what the loss could fall, by the square of how much less. Then the loss rises from noise, and not because each
#: minibatch is known by heart, and forgotten until it comes again.
BOUNDS = 0.01, 1.0, 3.0, 10.0
LITTLE = 0.25
#: The second is less where steps are to be longer (:mod:`quasidiag.bounce`), by this power of how much.
LESS = 3
#: That is what the echo tells, from the first of these on, and for certain at the second.
ECHOES = -0.1, -0.3
#: Steps that raised the loss by what they were to lower it (with its damping), or by what is usual if that is less, are
#: taken back, and the damping raised so that the next one is shorter, by this factor at most.
SHORTEST = 0.1
#: Relative to the loss: what is less than this may be rounding, and no harm, when steps are very short.
ROUNDING = 1e-6
#: What two in a row promised is no outlier's: the usual is taken to be no less than a part of it.
CHANGE = 10.0
#: The part of their natural step that the criterion's own parameters take, and the largest at first. They are then an
#: average over all minibatches so far, in which the *k*-th weighs as :math:`k^{\text{EARLY} - 1}`: errors fall quickly
#: at first.
OWN, HALF, EARLY = 0.04, 0.5, 2
#: The first step is so much shorter, and so many later none is: long first steps lead to where the loss is sharply
#: curved, and all that follow must be short.
FIRST, WARM_UP = 0.4, 40
#: How much of its average a new echo is, and how large it may be; how much of a step it takes to be heard.
ECHO, LOUDEST, WHOLE = 0.2, 2.0, 0.7
#: Relative, on the diagonal of the system of the coefficients: directions may do the same to the outputs.
RIDGE = 1e-6
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
        grasp: Average of the logarithm of ``unbounded``, relative to what the loss could fall.
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
        samples: Number of samples in the last minibatch, averaged over ranks.
        data: Fingerprint of the last minibatch's data; 0 if it was not a small one.
        level: Running average of the minibatches' losses.
        spread: Running variance of the minibatches' losses.
        losses: Number of losses in ``level`` and ``spread``.
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
    samples: float = 0.0
    data: float = float("nan")
    level: float = 0.0
    spread: float = 0.0
    losses: int = 0
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
        if "unbounded" not in kept:
            report.unbounded = report.promise
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


def minimiser(linear: Tensor, quadratic: Tensor) -> Tensor:
    r"""The coefficients *c* that minimise :math:`c·\text{linear} + \tfrac12 c^⊤ \text{quadratic}\, c`, in float64.

    Zero where the system has no finite solution.
    """
    scale = quadratic.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    system = quadratic * scale * scale.unsqueeze(1)
    system = system + RIDGE * torch.eye(len(linear), dtype=torch.float64)
    best, failed = torch.linalg.solve_ex(system, (scale * linear).unsqueeze(1))
    best = -scale * best.squeeze(1)
    return torch.zeros_like(best) if failed or not bool(best.isfinite().all()) else best


class QuadraticModel:
    """Measures the model of the loss along given directions, and keeps the damping in ``report``.

    Args:
        replay: runs the model again on a share of the minibatch.
        share: that share, if it is given.
        report: where to write what was found, and to read it from at the next step.
    """

    def __init__(self, replay: Replay, share: float | None, report: Report) -> None:
        self.replay, self.share, self.report = replay, share, report

    def coefficients(
        self,
        gradient: Direction,
        named: Mapping[str, Direction],
        metric: Tensor,
        factor: float,
        steep: float = 0.0,
        ranks: Any = None,
    ) -> list[float]:
        r"""The best coefficient of each direction *u*, times ``factor``; ``metric`` has their products :math:`u^⊤ M v`.

        ``steep`` is the slope along the natural gradient of the criterion's own parameters.
        """
        names, directions, k = [*named], [*named.values()], len(named)
        linear = dots(gradient, directions)
        fisher = self._fisher(directions)
        # g and M are the same on all ranks, up to rounding; the minibatch is not.
        room = torch.tensor([self.replay.above_least()], dtype=torch.float64)
        numbers = mean(torch.cat([linear, fisher.flatten(), room]), ranks)
        linear, fisher = numbers[:k], numbers[k:-1].view(k, k)
        fisher = self._averaged(names, fisher, metric.diagonal())
        part = self._possible(linear, fisher, float(numbers[-1]))
        best = minimiser(linear, fisher / part + self.report.damping * metric)
        self._expect(linear @ best, best @ fisher @ best, best @ metric @ best, steep, part)
        fisher = fisher / part
        self.report.coefficients = dict(zip(names, best.tolist()))
        self.report.slopes = dict(zip(names, linear.tolist()))
        best = best * factor
        predicted = float(linear @ best + 0.5 * best @ fisher @ best)
        self.report.predicted = predicted - steep * _gain(self.part(factor))
        self.report.length = float(best @ metric @ best)
        return best.tolist()

    def part(self, factor: float) -> float:
        """That of their natural step which the criterion's own parameters take: damped as the others' step is.

        At first as if they were an average over all minibatches so far; such steps are no shorter for being the first.
        """
        report = self.report
        early = EARLY / ((report.steps + 1 + EARLY) * report.warmth)
        return min(max(OWN, early) * factor, HALF) * report.damped

    def _possible(self, linear: Tensor, fisher: Tensor, room: float) -> float:
        r"""How much is left of the step without damping if the loss cannot fall by more than ``room``, as its parabola.

        The curvature of an output that is saturated, confident and wrong, is next to nothing; for a slope :math:`s` it
        cannot be less than :math:`s^2 / 2(ℓ - ℓ_{\min})`. Where two in a row promise more than that, the gradient is
        taken to have another loss besides.
        """
        if not math.isfinite(room):
            return 1.0
        report = self.report
        most = max(room, report.unbounded)
        promise = -0.5 * float(linear @ minimiser(linear, fisher))
        report.unbounded = promise
        if promise > 0 and room > 0:
            report.grasp += report.fresh * (math.log(promise) - math.log(room) - report.grasp)
        return most / promise if 0 < most < promise else 1.0

    def _expect(
        self,
        slope: Tensor,
        form: Tensor,
        length: Tensor,
        steep: float = 0.0,
        part: float = 1.0,
    ) -> None:
        """Of a step at a factor of 1.

        The form is larger by one over ``part`` where a loss has a least value; what is usual is as it was measured.
        """
        report, weight = self.report, self.report.fresh
        if length > 0:
            measured = float(form / length)
            report.curvature = measured / part
            most = BOUNDS[2] * report.usual or measured  # more is an outlier's
            report.usual += weight * (min(measured, most) - report.usual)
        before = report.promise
        report.promise = -0.5 * float(slope) + steep * _gain(self.part(1.0))
        if report.promise > 0:
            report.hope += weight * (math.log(report.promise) - report.hope)
            if before > 0:
                both = math.log(min(before, report.promise))
                report.hope = max(report.hope, both - math.log(CHANGE))

    def again(
        self, gradient: Direction, named: Mapping[str, Direction], factor: float, ranks: Any = None
    ) -> list[float]:
        """The coefficients of the last measurement, each smaller by as much as the slope along its direction is."""
        slopes = mean(dots(gradient, [*named.values()]), ranks).tolist()
        if not all(map(math.isfinite, slopes)):
            self.report.steady = False
            return [0.0] * len(slopes)
        known, length = self.report.slopes, self.report.coefficients
        parts = [min(max(slope / known[name], 0.0), 1.0) for name, slope in zip(named, slopes)]
        return [part * length[name] * factor for name, part in zip(named, parts)]

    def _fisher(self, directions: Sequence[Direction]) -> Tensor:
        total = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        for weight, batch in self.replay.weighted():
            total += weight * self._form(batch, directions)
        return total

    def _averaged(self, names: Sequence[str], fisher: Tensor, lengths: Tensor) -> Tensor:
        """The forms of directions of these lengths, from those of unit length, whose averages are kept.

        One that is not finite is none, and the average stays as it is.
        """
        scale = lengths.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        scale = scale * scale.unsqueeze(1)
        pairs = [(i, j) for i in range(len(names)) for j in range(i + 1)]
        fresh = {f"{names[i]}, {names[j]}": float(fisher[i, j] / scale[i, j]) for i, j in pairs}
        known = self.report.forms
        keep = FORMS if known.keys() == fresh.keys() else 0.0  # or the average may not be a form
        if all(map(math.isfinite, fresh.values())):
            kept = {name: keep * known.get(name, x) + (1 - keep) * x for name, x in fresh.items()}
            self.report.forms = kept
        else:
            kept = known if keep else fresh
        averaged = torch.zeros_like(fisher)
        for (i, j), form in zip(pairs, kept.values()):
            averaged[i, j] = averaged[j, i] = form * scale[i, j]
        return averaged

    def _form(self, batch: Batch, directions: Sequence[Direction]) -> Tensor:
        r""":math:`‹Ju, F_\text{out} Jv›` on a share of a minibatch."""
        criterion: OutputModel = self.replay.criterion
        terms = self.replay.terms(batch)
        share = min(SHARE, MOST / max(1, terms)) if self.share is None else self.share
        share = self._counting(batch, max(share, min(1.0, FEWEST / max(1, terms))), terms)
        output, target, moved = self.replay.tangents(batch, directions, share)
        dtype = torch.promote_types(output.dtype, torch.float32)
        output, moved = output.to(dtype), [u.to(dtype) for u in moved]
        counted = criterion.counted(output, target)
        if counted is not None:
            moved = [torch.where(counted, u, 0.0) for u in moved]
        rows = [torch.stack([criterion.inner(output, u, v) for v in moved]) for u in moved]
        form = torch.stack(rows).double() / max(1, int(criterion.terms(output, target)))
        return form.cpu()

    def size(self, ranks: Any = None) -> tuple[float, float]:
        """This step's samples on the average rank, and its loss: all ranks must come to the same judgement."""
        numbers = [float(self.replay.samples()), self.replay.loss()]
        samples, loss = mean(torch.tensor(numbers, dtype=torch.float64), ranks).tolist()
        return samples, loss

    def content(self, few: int, ranks: Any = None) -> tuple[float, float]:
        """How many terms this step's losses have on all ranks, and if those are few, what tells its data from others."""
        terms = self.replay.size()
        data = self.replay.fingerprint() if terms < few else 0.0
        numbers = mean(torch.tensor([terms, data], dtype=torch.float64), ranks)
        terms, data = (numbers * distributed.size(ranks)).tolist()
        return terms, data

    def judge(self, update: Direction, ranks: Any = None) -> bool:
        """What the way since the last time did to the loss of *this* minibatch, which it has not seen; whether harm.

        On its own minibatch every step looks good: with more parameters than samples, the model of the loss fits them.
        """
        report = self.report
        promise = report.stride * report.promise
        if not promise > 0:
            return False
        now, before = self._compared(before_way(update), ranks)
        if not before.isfinite():
            return False  # the data are to blame
        report.actual = float(now - before)
        predicted = report.stride * report.predicted
        report.ratio = report.actual / -abs(predicted) if predicted else 0.0
        most = min(promise, report.stride * math.exp(report.hope))
        if not report.actual < max(most, ROUNDING * abs(float(before))):
            # The parabola through what is known has its minimum at this part of the step, for a curvature that much larger.
            part = promise / (report.actual + 2 * promise)
            part = max(part, SHORTEST) if math.isfinite(report.actual) else SHORTEST
            again = report.trend == 0.0  # no good step since the last one that was taken back
            damping = (report.curvature + report.damping) / part - report.curvature
            self._damp(damping, math.inf if again else report.damping)
            report.trend = 0.0
            return True
        # On its own minibatch every step is good, and on the next one nearly every second is bad: what counts is the sum.
        report.trend = (1 - 1 / STEPS) ** report.stride * report.trend + report.actual
        change = report.rise if report.trend > 0 else DECAY
        self._damp(report.damping * change**report.stride, report.damping / 2)
        return False

    def above(self, start: Direction, ranks: Any = None) -> float:
        """How much higher the loss is than with the parameters ``start``, relative to what it could fall from there.

        Not a number where it could fall for ever, or is as low as can be.
        """
        least = sum(weight * self.replay.least(batch) for weight, batch in self.replay.weighted())
        if not start or not math.isfinite(least):
            return math.nan
        now, there = self._compared(start, ranks).tolist()
        room = there - float(mean(torch.tensor(least, dtype=torch.float64), ranks))
        return (now - there) / room if room > 0 else math.nan

    def _compared(self, start: Direction, ranks: Any) -> Tensor:
        """The loss, and what it would be with the parameters ``start``."""
        pairs = [
            torch.stack(self.replay.values(b, start, self._jury(b))) * w
            for w, b in self.replay.weighted()
        ]
        return mean(torch.stack(pairs).sum(0).cpu(), ranks)

    def _jury(self, batch: Batch) -> float:
        """The share of a minibatch that judges."""
        terms = self.replay.terms(batch)
        return self._counting(batch, JUDGES / terms if terms >= 2 * JUDGES else 1.0, terms)

    def _counting(self, batch: Batch, share: float, terms: int) -> float:
        """A share of a minibatch, or all of it if most of what counts lies elsewhere."""
        elsewhere = share < 1 and 2 * self.replay.terms(batch, share) < share * terms
        return 1.0 if elsewhere else share

    def _damp(self, damping: float, most: float) -> None:
        """Within the bounds, or up to ``most`` where that is more: beyond them it halves with every good judgement."""
        low, shared, high, highest = BOUNDS
        shared *= math.exp(-LESS * self.report.longer)
        little = max(math.log(LITTLE) - self.report.grasp, 0.0)
        high = math.exp(min(math.log(high) + 2 * little, math.log(highest)))
        high *= (shared / high) ** self.report.common
        usual = self.report.usual
        self.report.damping = min(max(damping, low * usual), max(high * usual, most))


def _gain(part: float) -> float:
    """What a part of the natural step lowers the loss by, for a slope of one along the whole."""
    return part * (1 - part / 2)
