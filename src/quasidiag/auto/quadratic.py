r"""The quadratic model of the loss along a few directions, and the judge of the steps that it proposed.

.. math:: g^⊤ δ + \tfrac12 δ^⊤ (F + λ M) δ,

where :math:`F` is the Fisher matrix of the minibatch itself, no approximation: :math:`u^⊤ F v = ‹Ju, F_\text{out} Jv›`
needs only the derivatives of the outputs along the directions. The damping :math:`λ` rises while the loss does: steps are
judged on the next minibatch, which they have not seen, and those that did great harm there are undone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quasidiag import distributed
from quasidiag.auto.directions import Direction, after_step, before_way, dots, mean, means
from quasidiag.auto.parabola import Array, Parabola, minimiser
from quasidiag.auto.penalty import Penalty
from quasidiag.auto.replay import Batch, Replay
from quasidiag.auto.report import STEPS, WARM_UP, Report
from quasidiag.auto.rhythm import MODEL
from quasidiag.callers import outside
from quasidiag.outputs import OutputModel
from quasidiag.strata import FEW

#: Weight of the old average of the quadratic forms when a new measurement, of a share of a minibatch, enters (a power of it
#: if more than ``MODEL`` steps lie between). Until the first steps are over, the old average counts for ``MORE`` times the
#: new one at most: a sharp place that was left behind (its steps were undone, say) would else shorten dozens of steps.
#: So it does later if that makes less than ``FALLEN`` of it, which is no noise.
FORMS, MORE, FALLEN = 0.5, 5.0, 1e-3
#: Unless ``step_fraction`` is given, that share is ``SHARE``, and ``MOST`` terms at most; in any case it is ``FEWEST`` terms
#: at least, if there are as many. Where samples are chosen by how much they matter (:mod:`quasidiag.strata`), the share is
#: ``EIGHTH``, and such a part also tries steps.
SHARE, MOST, FEWEST, EIGHTH = 0.5, 2048, 128, 0.125
#: So many terms judge the last steps, where a minibatch has at least twice as many; else all of them do, or as many samples
#: as matter.
JUDGES = 4096
#: While the loss does not rise, each step multiplies the damping by this.
DECAY = 0.95
#: Bounds of the damping, relative to the usual curvature. The first is the lower one. The upper one is the second where
#: minibatches have their curvature in common, and the third where they do not. If the grasp is less than ``LITTLE``, the
#: third grows with the square of how much less, up to the fourth: the loss then rises because of noise, and not because
#: each minibatch is memorised and forgotten until it comes again.
BOUNDS = 0.01, 1.0, 3.0, 100.0
LITTLE = 0.25
#: Where a small bounce makes steps longer by a factor (:mod:`quasidiag.auto.bounce`), the second of these bounds is divided
#: by this power of the factor.
LESS = 3
#: A step that promises more than ``LITTLE`` of what the loss could fall is tried on its own minibatch, up to ``TRIALS``
#: times, because the further outputs move, the less their loss is a parabola. So are the very first step, and one after a
#: step that did not keep its promise: less than ``TRUE`` of it came true. After one that did, the promises of the next
#: ``PROVEN`` measured steps are believed, once the first steps are over.
TRIALS, TRUE, PROVEN = 6, 0.5, 3
#: If a trial fails, the step is shortened for the next one, to ``SHORTER`` of it at least: through many layers the loss is
#: much steeper further on than a parabola. It is shortened to ``SHORTEST`` if the loss rose by ``FAR`` times itself.
SHORTER, FAR = 0.5, 1e3
#: The weight of what trials left of a step in the average that the next ones begin with, and what a step that needed no
#: shortening multiplies that average by.
LEARNT, REGAINED = 0.2, 1.05
#: Steps are undone if they raised the loss by as much as the damped model promised to lower it, or by the usual promise if
#: that is less. The damping is then raised so that the next step is shorter, by this factor at most.
SHORTEST = 0.1
#: A rise of less than this part of the loss counts as rounding, not as harm: steps may be very short.
ROUNDING = 1e-6
#: What two measured steps in a row promised is no outlier: the usual promise is at least one in so many of it.
CHANGE = 10.0
#: The criterion's own parameters take ``OWN`` of their natural step, more in the first steps but ``HALF`` at most. At first
#: they are an average over all minibatches so far, in which the *k*-th has a weight of :math:`k^{\text{EARLY} - 1}` because
#: errors fall quickly then.
OWN, HALF, EARLY = 0.04, 0.5, 2


class QuadraticModel:
    """Measures the model of the loss along given directions, and keeps the damping in ``report``.

    Args:
        replay: runs the model again on a share of the minibatch.
        share: that share; ``None`` for the default.
        report: keeps what was found for the next step.
    """

    def __init__(self, replay: Replay, share: float | None, report: Report) -> None:
        self.replay, self.share, self.report = replay, share, report
        #: The weight decay, as a part of the loss in this step.
        self.penalty = Penalty({})

    @np.errstate(all="ignore")  # numbers that are not finite are handled
    def coefficients(
        self,
        gradient: Direction,
        named: Mapping[str, Direction],
        along: Mapping[str, Any],
        products: Tensor,
        factor: float,
        largest: Mapping[str, float],
        steep: float = 0.0,
        ranks: Any = None,
    ) -> list[float]:
        r"""The best coefficient of each direction, times ``factor`` and the direction's part of it, ``largest``.

        ``along`` has the slopes along directions that are known already, ``products`` the :math:`u^⊤ M v` of all pairs,
        ``steep`` is the slope along the natural gradient of the criterion's own parameters. What was found goes into the
        report.
        """
        names, directions, k = [*named], [*named.values()], len(named)
        forms, own = self._fisher(directions)
        decay = np.zeros_like(forms)
        if self.penalty.decays:
            decay = self.penalty.forms(directions).numpy()
            own = own + self.penalty.slopes(directions).numpy()
        # g and M are the same on all ranks up to rounding, but all ranks must decide alike: so they are averaged as well.
        first = [*_slopes(gradient, named, along), self.replay.above_least(), self.penalty.now]
        squares = (x.ravel() for x in (forms, decay, products.numpy()))
        numbers = mean(torch.from_numpy(np.concatenate([first, own, *squares])), ranks).numpy()
        linear, (room, size), slopes = numbers[:k], numbers[k : k + 2], numbers[k + 2 : 2 * k + 2]
        fisher, decaying, metric = numbers[2 * k + 2 :].reshape(3, k, k)
        if not (np.isfinite(linear).all() and np.isfinite(metric).all()):
            warnings.warn(
                "no layer moves in this step: a direction is not finite, or not in the metric. Are inputs or targets "
                "extremely large or small?",
                RuntimeWarning,
                stacklevel=outside(),
            )
        fisher = self._averaged(names, fisher, metric.diagonal()) + decaying
        part = self._possible(linear, slopes, fisher, float(room), float(size))
        factors = np.array([factor * largest[name] for name in names])
        parabola = Parabola(linear, fisher, self.report.damping * metric, factors)
        part = self._trusted(parabola, part, directions, float(room + size), ranks)
        parabola = parabola.steeper(part)
        best = parabola.best
        step = factors * best
        form, length = float(best @ fisher @ best), float(best @ metric @ best)
        self._expect(float(linear @ best), form, length, steep, part)
        self.report.coefficients = dict(zip(names, best.tolist()))
        self.report.slopes = dict(zip(names, linear.tolist()))
        self.report.predicted = parabola.change(step) - steep * _gain(self.part(factor))
        self.report.length = float(step @ metric @ step)
        return [*map(float, step)]

    def part(self, factor: float) -> float:
        """The part of their natural step that the criterion's own parameters take, damped as the others' step is.

        At first it makes them an average over all minibatches so far; the shortening of the first steps is taken out.
        """
        report = self.report
        early = EARLY / ((report.steps + 1 + EARLY) * report.warmth)
        return min(max(OWN, early) * factor, HALF) * report.damped

    def _possible(
        self, linear: Array, slopes: Array, fisher: Array, room: float, size: float = 0.0
    ) -> float:
        r"""The part of the undamped step that is left if its promise is bounded by how much the loss can fall.

        That is ``room`` for the criterion's loss, and ``size`` for the weight decay's. The curvature of an output that is
        saturated, confident and wrong, is next to nothing; for a slope :math:`s` it cannot be less than
        :math:`s^2 / 2(ℓ - ℓ_{\min})`. Where the gradient is steeper than the criterion's own ``slopes``, there is another
        loss besides, which may fall as well. It has to show twice in a row, because ``slopes`` are those of a share of the
        minibatch.
        """
        report, best = self.report, minimiser(linear, fisher)
        promise, besides = -0.5 * float(linear @ best), -0.5 * float((linear - slopes) @ best)
        known = math.isfinite(besides)
        besides = besides if known else 0.0
        most = room + size + max(0.0, min(besides, report.besides))
        report.unbounded, report.besides = promise, besides
        if known and promise > 0:
            report.mixes(besides / promise)
        if promise > 0 and 0 < room < math.inf:
            grasp = math.log(promise * report.small) - math.log(room)
            report.grasp += report.fresh * (grasp - report.grasp)
        return most / promise if 0 < most < promise else 1.0

    def _trusted(
        self,
        parabola: Parabola,
        part: float,
        directions: Sequence[Direction],
        room: float,
        ranks: Any,
    ) -> float:
        """The part of the undamped step that trials leave, ``part`` at most.

        What they leave enters an average, ``report.trust``, and the next measured steps begin with no more than that: where
        the loss is always more curved than the model, each of them would else be tried several times. If more than half
        of what is promised is another loss's than the criterion's, nothing is tried: a trial does not see that one.
        """
        report, trust, left = self.report, self.report.trust, 1.0
        report.doubt, doubt = False, report.doubt
        report.proven, proven = max(0, report.proven - 1), report.proven > 0
        if not report.besides < 0.5 * report.unbounded:
            return part
        part = min(part, trust)
        for _ in range(TRIALS):
            steeper = parabola.steeper(part * left)
            bold = not proven and -steeper.change(steeper.step) > LITTLE * room
            if not (doubt or bold or trust < 1):
                break
            tried = self._tried(steeper, directions, ranks)
            if tried == 1:
                report.proven = PROVEN if left == 1 and report.steps >= WARM_UP else 0
                break
            left, doubt, report.doubt = left * tried, True, True
        if report.steps >= WARM_UP:  # the first steps tell little about later ones
            report.trust = min(1.0, trust * (left**LEARNT if report.doubt else REGAINED))
        return part * left

    def _tried(self, parabola: Parabola, directions: Sequence[Direction], ranks: Any) -> float:
        """Try a step on its own minibatch: the model's curvature over the loss's own, 1 if the loss falls as promised.

        The loss's own is that of the parabola through the slope and the loss after the step. The result is ``SHORTER`` at
        least, or ``SHORTEST`` if the loss rose by ``FAR`` times itself.
        """
        step = parabola.step
        slope, promised = float(parabola.slopes @ step), parabola.change(step)
        now, after = self._compared(after_step(directions, step.tolist()), ranks, self._trial)
        change = after - now
        if not math.isfinite(now) or change <= TRUE * promised:
            return 1.0
        if abs(change) - promised < ROUNDING * abs(now):  # both are nothing but rounding
            return 1.0
        if not change < FAR * abs(now):
            return SHORTEST
        return min(max((promised - slope) / (change - slope), SHORTER), 1.0)

    def _expect(
        self,
        slope: float,
        form: float,
        length: float,
        steep: float = 0.0,
        part: float = 1.0,
    ) -> None:
        """Note in the report the curvature and the promise of a step at a factor of 1, and their usual values.

        The curvature is larger than ``form`` says, by 1/``part``, where the loss's least value or a trial shortened the
        step. The usual curvature is the average of the measured ones. Its lower bound on the damping is no more than the
        curvatures measured last, or than 1, which is in the order of :math:`δ^⊤ F δ` over :math:`δ^⊤ M δ`: training may
        begin where the metric is next to nothing, which makes the first measured curvature immense.
        """
        report, weight = self.report, self.report.fresh
        if length > 0:
            report.bare, last = form / length, report.bare
            report.curvature = report.bare / part
            most = BOUNDS[2] * report.usual or report.bare  # more is taken for an outlier
            report.usual += weight * (min(report.bare, most) - report.usual)
            highest = max(last, report.bare, 1.0) / BOUNDS[0]
            if report.usual > highest and last > 0:
                report.damping *= highest / report.usual
                report.usual = highest
        before = report.promise
        report.promise = -0.5 * slope + steep * _gain(self.part(1.0))
        if report.promise > 0:
            report.hope += weight * (math.log(report.promise) - report.hope)
            if before > 0:
                both = math.log(min(before, report.promise))
                report.hope = max(report.hope, both - math.log(CHANGE))

    def again(
        self,
        gradient: Direction,
        named: Mapping[str, Direction],
        along: Mapping[str, Any],
        factor: float,
        largest: Mapping[str, float],
        ranks: Any = None,
    ) -> list[float]:
        """The coefficients of the last measurement, each smaller in proportion where the slope along its direction is."""
        slopes = means(_slopes(gradient, named, along), ranks)
        if not all(map(math.isfinite, slopes)):
            self.report.steady = False
            return [0.0] * len(slopes)
        before, length = self.report.slopes, self.report.coefficients
        return [
            min(max(slope / before[name], 0.0), 1.0) * length[name] * factor * largest[name]
            if length[name]
            else 0.0
            for name, slope in zip(named, slopes)
        ]

    def _fisher(self, directions: Sequence[Direction]) -> tuple[Array, Array]:
        r"""The products :math:`u^⊤ F v` of all pairs of directions, and the criterion's slope along each."""
        k = len(directions)
        forms, slopes = np.zeros((k, k)), np.zeros(k)
        for weight, batch in self.replay.weighted():
            form, slope = self._form(batch, directions)
            forms, slopes = forms + weight * form, slopes + weight * slope
        return forms, slopes

    def _averaged(self, names: Sequence[str], fisher: Array, lengths: Array) -> Array:
        """The averaged forms of these directions, whose squared lengths in the metric are ``lengths``.

        Averages are kept for directions of unit length; a measurement that is not finite does not enter them.
        """
        scale = np.maximum(lengths, np.finfo(np.float64).tiny) ** 0.5
        scale = scale * scale[:, None]
        pairs = [(i, j) for i in range(len(names)) for j in range(i + 1)]
        fresh = {f"{names[i]}, {names[j]}": float(fisher[i, j] / scale[i, j]) for i, j in pairs}
        known = self.report.forms
        # An average with entries of other directions in it might not be a positive form.
        age = max(1.0, self.report.stride / MODEL)
        keep = FORMS**age if known.keys() == fresh.keys() else 0.0
        if all(map(math.isfinite, fresh.values())):
            ratio = _ratio(known, fresh, names) if keep else 1.0
            fallen = self.report.steps < WARM_UP or ratio < FALLEN
            old = keep * ratio if fallen else keep
            kept = {name: old * known.get(name, x) + (1 - keep) * x for name, x in fresh.items()}
            self.report.forms = kept
        else:
            kept = known if keep else fresh
        averaged = np.zeros_like(fisher)
        for (i, j), form in zip(pairs, kept.values()):
            averaged[i, j] = averaged[j, i] = form * scale[i, j]
        return averaged

    def _form(self, batch: Batch, directions: Sequence[Direction]) -> tuple[Array, Array]:
        r""":math:`‹Ju, F_\text{out} Jv›` and :math:`‹Ju, ∂ℓ/∂\text{out}›` on a share of a minibatch.

        The latter, the criterion's slopes, are nan where the share's outputs are not those of the training pass (other
        dropout masks, say): there the gradient is steeper than they are, and no other loss is the reason.
        """
        criterion: OutputModel = self.replay.criterion
        share = self._measured(batch)
        output, target, moved = self.replay.tangents(batch, directions, share)
        division, part = self.replay.division, self.replay.part(batch, share)
        alike = division.alike(batch, output, part)
        dtype = torch.promote_types(output.dtype, torch.float32)
        output, moved = output.to(dtype), [u.to(dtype) for u in moved]
        counted = criterion.counted(output, target)
        if counted is not None:
            moved = [torch.where(counted, u, 0.0) for u in moved]
        residual, terms = criterion.residual(output, target), criterion.terms(output, target)
        if counted is not None:
            residual = torch.where(counted, residual, 0.0)
        if part is not None and part.chosen:
            root = part.weights(output).sqrt()
            moved, residual = [u * root for u in moved], residual * root
            terms = self.replay.terms(batch)
        products = [criterion.inner(output, u, v) for u in moved for v in moved]
        along = [(residual * u).sum() for u in moved]
        found = torch.stack([*products, *along, alike.to(along[0].dtype)])
        *numbers, same = found.tolist()  # one copy from the device
        each, k = np.array(numbers) / max(1, int(terms)), len(moved)
        forms, slopes = each[: k * k].reshape(k, k), each[k * k :]
        if not same:
            division.apart, slopes = False, np.full_like(slopes, math.nan)
        return forms, slopes

    def _measured(self, batch: Batch) -> float:
        """The share of a minibatch that the model is measured on."""
        terms, strata = max(1, self.replay.terms(batch)), self.replay.division.strata(batch)
        share = self.share
        if share is None:
            share = min(SHARE if strata is None else EIGHTH, MOST / terms)
        least = FEWEST / terms if strata is None else FEW / strata.samples
        return self._counting(batch, max(share, min(1.0, least)), terms)

    def size(self, ranks: Any = None) -> tuple[float, float]:
        """The number of samples and the loss of this step, averaged over ranks, which all must decide alike."""
        samples, loss = means([float(self.replay.samples()), self.replay.loss()], ranks)
        return samples, loss

    def content(self, few: int, ranks: Any = None) -> tuple[float, float]:
        """How many terms this step's losses have on all ranks; and if less than ``few``, its data's fingerprint, else 0."""
        terms = float(self.replay.size())
        data = self.replay.fingerprint() if terms < few else 0.0
        terms, data = (x * distributed.size(ranks) for x in means([terms, data], ranks))
        return terms, data

    def judge(self, update: Direction, ranks: Any = None) -> bool:
        """Whether the steps since the last measurement, ``update`` in all, are to be undone; sets the damping.

        They are judged by the loss of *this* minibatch, which they have not seen, before and after them. On its own
        minibatch every step looks good: with more parameters than samples, the model of the loss fits them.
        """
        report = self.report
        promise = report.stride * report.promise
        if not promise > 0:
            return False
        now, before = self._compared(before_way(update), ranks)
        if not math.isfinite(before):
            return False  # the data are to blame, not the steps
        report.actual = now - before
        predicted = report.stride * report.predicted
        report.ratio = report.actual / -abs(predicted) if predicted else 0.0
        most = min(promise, report.stride * math.exp(report.hope))
        if not report.actual < max(most, ROUNDING * abs(before)):
            # The parabola through the slope and the damage has its minimum at this part of the step.
            # After two retreats in a row, which leave no trend, the damping has no upper bound.
            self.shorten(promise / (report.actual + 2 * promise), bounded=report.trend != 0.0)
            return True
        # On the next minibatch nearly every second step raises the loss: what counts is the sum of the changes.
        report.trend = (1 - 1 / STEPS) ** report.stride * report.trend + report.actual
        change = report.rise if report.trend > 0 else DECAY
        self._damp(report.damping * change**report.stride, report.damping / 2)
        return False

    def shorten(self, part: float, bounded: bool = False) -> None:
        """Raise the damping so that the next step is ``part`` of the last measured one, ``SHORTEST`` at least.

        Its usual upper bound holds if ``bounded``.
        """
        report = self.report
        part = max(part, SHORTEST) if math.isfinite(part) else SHORTEST
        damping = (report.curvature + report.damping) / part - report.curvature
        self._damp(damping, report.damping if bounded else math.inf)
        report.trend = 0.0

    def above(self, start: Direction, ranks: Any = None) -> float:
        """How much higher the loss is than with the parameters ``start``, relative to what it could fall from there.

        nan if the loss has no least value, or has reached it.
        """
        least = sum(weight * self.replay.least(batch) for weight, batch in self.replay.weighted())
        if not start or not math.isfinite(least):
            return math.nan
        now, there = self._compared(start, ranks)
        least += self.penalty.value(start)  # which is not expected to fall
        room = there - means([least], ranks)[0]
        return (now - there) / room if room > 0 else math.nan

    def _compared(
        self, start: Direction, ranks: Any, share: Callable[[Batch], float] | None = None
    ) -> Sequence[float]:
        """The loss now and with the parameters ``start``, weight decay included, averaged over ranks.

        By a ``share`` of each minibatch, which is the jury unless it is given.
        """
        share, (weights, batches) = share or self._jury, zip(*self.replay.weighted())
        pairs = [self.replay.values(batch, start, share(batch)) for batch in batches]
        found = torch.stack([value for pair in pairs for value in pair]).tolist()
        now, then = (sum(map(mul, weights, found[k::2])) for k in (0, 1))
        return means([now + self.penalty.now, then + self.penalty.value(start)], ranks)

    def _trial(self, batch: Batch) -> float:
        """The share of a minibatch that tries steps: what the model is measured on, if it is chosen by what matters."""
        chosen = self.replay.division.strata(batch) is not None
        return self._measured(batch) if chosen else self._jury(batch)

    def _jury(self, batch: Batch) -> float:
        """The share of a minibatch that judges steps."""
        terms, strata = self.replay.terms(batch), self.replay.division.strata(batch)
        share = JUDGES / terms if terms >= 2 * JUDGES else 1.0
        if strata is not None:
            share = min(share, strata.enough / strata.samples)
        return self._counting(batch, share, terms)

    def _counting(self, batch: Batch, share: float, terms: int) -> float:
        """``share``, or 1 if it holds less than half of the terms that it should (others are masked, say)."""
        elsewhere = share < 1 and 2 * self.replay.terms(batch, share) < share * terms
        return 1.0 if elsewhere else share

    def _damp(self, damping: float, most: float) -> None:
        """Set the damping, within its bounds or up to ``most`` if that is more.

        A good judgement gives half the current damping as ``most``, so that beyond the bounds it halves with each.
        """
        low, shared, high, highest = BOUNDS
        shared *= math.exp(-LESS * self.report.longer)
        little = max(math.log(LITTLE) - self.report.grasp, 0.0)
        high = math.exp(min(math.log(high) + 2 * little, math.log(highest)))
        high *= (shared / high) ** self.report.common
        usual = self.report.usual
        self.report.damping = min(max(damping, low * usual), max(high * usual, most))


def _slopes(
    gradient: Direction, named: Mapping[str, Direction], along: Mapping[str, Any]
) -> list[float]:
    """The slopes along all directions; those in ``along`` are not computed again."""
    fresh = [name for name in named if along.get(name) is None]
    found = dots(gradient, [named[name] for name in fresh]) if fresh else []
    known = {**along, **dict(zip(fresh, found))}
    return [known[name] for name in named]


def _ratio(known: Mapping[str, float], fresh: Mapping[str, float], names: Sequence[str]) -> float:
    """What multiplies the average of the forms, so that it is at most ``MORE`` times a new measurement."""
    before, now = (sum(forms[f"{name}, {name}"] for name in names) for forms in (known, fresh))
    return min(1.0, MORE * now / before) if before > 0 < now else 1.0


def _gain(part: float) -> float:
    """How much a part of the natural step lowers the loss, if the slope along the whole natural step is one."""
    return part * (1 - part / 2)
