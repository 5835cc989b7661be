r"""The step without a learning rate: length and momentum from the exact quadratic model.

With a direction :math:`d`, the averaged gradient with its strengths equalised in the coordinates of the metric
(:mod:`quasidiag.orthogonal`), and the previous update :math:`δ_-`, the step is :math:`δ = -α d + μ δ_-` with the
:math:`(α, μ)` that minimise

.. math:: g^⊤ δ + \tfrac12 δ^⊤ (F + λ M) δ,

where :math:`F` is the Fisher matrix of the minibatch itself, no approximation: :math:`u^⊤ F v = ‹Ju, F_\text{out} Jv›`
needs the derivatives of the outputs along two directions only. The damping :math:`λ` rises while the loss does: each
step is judged on the next minibatch, which it has not seen, and one that did great harm there is taken back. All of
these numbers are geometric, so the step depends on how inputs and activities are encoded no more than :math:`d` does.
Parameters outside of every block have no metric, only a diagonal rule of another scale: they make a direction of their
own, with a third coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quasidiag import distributed, orthogonal, together
from quasidiag.blocks import DiagonalBlock
from quasidiag.orthogonal import Pair
from quasidiag.outputs import OutputModel
from quasidiag.replay import Batch, Replay
from quasidiag.sums import dtype_of

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

Direction = Mapping[Tensor, Tensor]

#: How much of the gradient's average survives a step.
AVERAGING = 0.8
#: How much of the average of the quadratic forms does, which are those of a share of the minibatch.
FORMS = 0.5
#: That share holds so many samples at least, if there are as many.
FEWEST = 128
#: What the steps did to the loss is summed up over about this many of them. While the sum is a rise the damping grows
#: by a factor a step, else it falls by one.
STEPS, RISE, DECAY = 50, 1.2, 0.95
#: The metric is updated in each of the first steps, while the network changes quickly.
AT_FIRST = 10
#: Of the damping, relative to the curvature along the usual step.
BOUNDS = 0.01, 10.0
#: A step that raised the loss by what it was to lower it (with its damping), or by what is usual if that is less, is taken
#: back, and the damping raised so that the next one is shorter, by this factor at most.
SHORTEST = 0.1
#: What two in a row promised is no outlier's: the usual is taken to be no less than a part of it.
CHANGE = 10.0
#: No layer moves by more than so many times its own weights: what little it has to say may be far from linear. Directions
#: are shortened and measured anew so often. As this depends on the encoding, it is one of the safeguards.
LONGEST, ROUNDS = 10.0, 3
#: Of the last update's length to what it shares with the new directions, at least.
APART = 1.1
#: Relative, on the diagonal of the system of the coefficients: the directions may coincide.
RIDGE = 1e-6


@dataclass
class Report:
    r"""What the last step did.

    Attributes:
        alpha: :math:`α`, the length along the new direction.
        mu: :math:`μ`, the momentum.
        other: the length along the direction of the parameters that are in no block.
        damping: :math:`λ`.
        predicted: the change of the loss that the quadratic model expected of the last step.
        promise: how much the damped model is lowered by that step at a factor of 1.
        hope: the average of its logarithm.
        actual: the change that the step before brought, on the minibatch after it.
        ratio: of that to what was predicted.
        trend: the sum of such changes, older ones counting less.
        length: the step's length in the metric, :math:`δ^⊤ M δ`.
        curvature: of the loss along it, relative to that, :math:`δ^⊤ F δ / δ^⊤ M δ`.
        usual: the average of such curvatures.
        steps: steps so far.
        retreats: how many of them were taken back.
        factor: the ``lr`` that the last step was multiplied by.
        samples: how many it saw, on the average rank.
        forms: the averages of :math:`u^⊤Fv / \sqrt{u^⊤Mu\; v^⊤Mv}`, by the names of the directions.
    """

    alpha: float = 0.0
    mu: float = 0.0
    other: float = 0.0
    damping: float = 0.0
    predicted: float = 0.0
    promise: float = 0.0
    hope: float = 0.0
    actual: float = float("nan")
    ratio: float = float("nan")
    trend: float = 0.0
    length: float = 0.0
    curvature: float = 0.0
    usual: float = 0.0
    steps: int = 0
    retreats: int = 0
    factor: float = 1.0
    samples: float = 0.0
    forms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def saved(cls, kept: Mapping[str, Any]) -> Report:
        """From what a ``state_dict`` has of it, which may be of another version."""
        report = cls(**{key: kept[key] for key in vars(cls()) if key in kept})
        if "hope" not in kept and report.promise > 0:
            report.hope = math.log(report.promise)
        return report


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
        share: that share.
        report: where to write what was found, and to read it from at the next step.
    """

    def __init__(self, replay: Replay, share: float, report: Report) -> None:
        self.replay, self.share, self.report = replay, share, report

    def coefficients(
        self,
        gradient: Direction,
        named: Mapping[str, Direction],
        images: Sequence[Direction | None],
        factor: float,
        ranks: Any = None,
    ) -> list[float]:
        r"""The best coefficient of each direction *u*, times ``factor``.

        ``images`` are the :math:`Mu`. The last update's is ``None``: of that the length is known, in the metric as it
        was then.
        """
        names, directions, k = [*named], [*named.values()], len(named)
        linear = torch.stack([_dot(gradient, u) for u in directions])
        fisher = self._fisher(directions)
        # g and M are the same on all ranks, up to rounding; the minibatch is not.
        numbers = _mean(torch.cat([linear, fisher.flatten()]), ranks)
        linear, fisher = numbers[:k], numbers[k:].view(k, k)
        metric = self._metric(directions, images)
        fisher = self._averaged(names, fisher, metric.diagonal())
        best = minimiser(linear, fisher + self.report.damping * metric)
        self._expect(linear @ best, best @ fisher @ best, best @ metric @ best)
        best = best * factor
        self.report.predicted = float(linear @ best + 0.5 * best @ fisher @ best)
        self.report.length = float(best @ metric @ best)
        return best.tolist()

    def _expect(self, slope: Tensor, form: Tensor, length: Tensor) -> None:
        """Of a step at a factor of 1. The averages begin with the first one that there is."""
        report, weight = self.report, 1 / min(self.report.steps + 1, STEPS)
        weight = weight if report.usual else 1.0
        before, report.promise = report.promise, -0.5 * float(slope)
        if report.promise > 0:
            report.hope += weight * (math.log(report.promise) - report.hope)
            if before > 0:
                both = math.log(min(before, report.promise))
                report.hope = max(report.hope, both - math.log(CHANGE))
        if length > 0:
            report.curvature = float(form / length)
            most = BOUNDS[1] * report.usual or report.curvature  # more is an outlier's
            report.usual += weight * (min(report.curvature, most) - report.usual)

    def _metric(
        self, directions: Sequence[Direction], images: Sequence[Direction | None]
    ) -> Tensor:
        known = [i for i, image in enumerate(images) if image is not None]
        metric = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        for i in known:
            for j, u in enumerate(directions):
                metric[i, j] = metric[j, i] = _dot(images[i] or {}, u)
        for i in set(range(len(directions))) - set(known):
            # As it was then; more than what it shares with the other directions now, or what they differ by has no length.
            shared = sum(float(metric[i, j] ** 2 / metric[j, j]) for j in known if metric[j, j] > 0)
            metric[i, i] = max(self.report.length, APART * shared)
        return metric

    def _fisher(self, directions: Sequence[Direction]) -> Tensor:
        own = self.replay.criterion.parameter_fisher()
        inner = [{p: u for p, u in d.items() if p not in own} for d in directions]
        total = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        for weight, batch in self.replay.weighted():
            total += weight * self._form(batch, inner)
        for i, u in enumerate(directions):
            for j, v in enumerate(directions):
                total[i, j] += sum(
                    (own[p] * u[p] * v[p]).sum().item() for p in own if p in u and p in v
                )
        return total

    def _averaged(self, names: Sequence[str], fisher: Tensor, lengths: Tensor) -> Tensor:
        """The forms of directions of these lengths, from those of unit length, whose averages are kept."""
        scale = lengths.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        scale = scale * scale.unsqueeze(1)
        pairs = [(i, j) for i in range(len(names)) for j in range(i + 1)]
        fresh = {f"{names[i]}, {names[j]}": float(fisher[i, j] / scale[i, j]) for i, j in pairs}
        known = self.report.forms
        keep = FORMS if known.keys() == fresh.keys() else 0.0  # or the average may not be a form
        kept = {name: keep * known.get(name, new) + (1 - keep) * new for name, new in fresh.items()}
        self.report.forms = kept
        averaged = torch.zeros_like(fisher)
        for (i, j), form in zip(pairs, kept.values()):
            averaged[i, j] = averaged[j, i] = form * scale[i, j]
        return averaged

    def _form(self, batch: Batch, directions: Sequence[Direction]) -> Tensor:
        r""":math:`‹Ju, F_\text{out} Jv›` on a share of a minibatch."""
        criterion: OutputModel = self.replay.criterion
        terms = self.replay.terms(batch)
        share = max(self.share, min(1.0, FEWEST / max(1, terms)))
        if share < 1 and 2 * self.replay.terms(batch, share) < share * terms:
            share = 1.0  # what counts lies elsewhere
        output, target, moved = self.replay.tangents(batch, directions, share)
        dtype = torch.promote_types(output.dtype, torch.float32)
        output, moved = output.to(dtype), [u.to(dtype) for u in moved]
        counted = criterion.counted(output, target)
        if counted is not None:
            moved = [torch.where(counted, u, 0.0) for u in moved]
        rows = [torch.stack([criterion.inner(output, u, v) for v in moved]) for u in moved]
        form = torch.stack(rows).double() / max(1, int(criterion.terms(output, target)))
        return form.cpu()

    def samples(self, ranks: Any = None) -> float:
        """How many samples this step has, on the average rank: all must come to the same judgement."""
        return float(_mean(torch.tensor(float(self.replay.samples()), dtype=torch.float64), ranks))

    def judge(self, update: Direction, ranks: Any = None) -> bool:
        """What the last update did to the loss of *this* minibatch, which it has not seen; whether it did harm.

        On its own minibatch every step looks good: with more parameters than samples, the model of the loss fits them.
        """
        report = self.report
        if not report.promise > 0:
            return False
        start = {p: p.detach() - u.to(p.dtype) for p, u in update.items()}
        pairs = [torch.stack(self.replay.values(b, start)) * w for w, b in self.replay.weighted()]
        now, before = _mean(torch.stack(pairs).sum(0).cpu(), ranks)
        if not before.isfinite():
            return False  # the data are to blame
        report.actual = float(now - before)
        report.ratio = report.actual / -abs(report.predicted) if report.predicted else 0.0
        if not report.actual < min(report.promise, math.exp(report.hope)):
            # The parabola through what is known has its minimum at this part of the step, for a curvature that much larger.
            part = report.promise / (report.actual + 2 * report.promise)
            part = max(part, SHORTEST) if math.isfinite(report.actual) else SHORTEST
            again = report.trend == 0.0  # no good step since the last one that was taken back
            damping = (report.curvature + report.damping) / part - report.curvature
            self._damp(damping, math.inf if again else report.damping)
            report.trend = 0.0
            return True
        # On its own minibatch every step is good, and on the next one nearly every second is bad: what counts is the sum.
        report.trend = (1 - 1 / STEPS) * report.trend + report.actual
        self._damp(report.damping * (RISE if report.trend > 0 else DECAY), report.damping / 2)
        return False

    def _damp(self, damping: float, most: float) -> None:
        """Within the bounds, or up to ``most`` where that is more: beyond them it halves with every step that is kept."""
        low, high = (bound * self.report.usual for bound in BOUNDS)
        self.report.damping = min(max(damping, low), max(high, most))


def retreat_(optimizer: Riemannian, model: QuadraticModel) -> bool:
    """Take the last update back if it did harm. This minibatch's gradient is then of no use."""
    ranks = None if optimizer._exchange is None else optimizer._exchange.group
    update: dict[Tensor, Tensor] = {
        p: optimizer.state[p]["update"] for p in optimizer._group if "update" in optimizer.state[p]
    }
    before, model.report.samples = model.report.samples, model.samples(ranks)
    few = model.report.samples < before / 2  # an epoch's last minibatch is no judge
    if not update or few or not model.judge(update, ranks):
        return False
    for p, u in update.items():
        p.sub_(u.to(p.dtype))
        del optimizer.state[p]["update"]
    model.report.length = 0.0
    model.report.retreats += 1
    return True


def propose(
    optimizer: Riemannian, gradient: Direction
) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    """The new direction *d*, from the averaged gradient, and its image *Md*."""
    others = set(optimizer._others)
    averaged = {p: _average_(optimizer.state[p], g) for p, g in gradient.items() if p not in others}
    direction: dict[Tensor, Tensor] = {}
    image: dict[Tensor, Tensor] = {}
    for block in optimizer._blocks:
        if optimizer._known(block) and any(p in gradient for p in block.parameters):
            given = [averaged.get(p, torch.zeros_like(p)) for p in block.parameters]
            d, v = _of_block(optimizer, block, given)
            direction |= {p: w for p, w in zip(block.parameters, d) if p in gradient}
            image |= {p: w for p, w in zip(block.parameters, v) if p in gradient}
    assert optimizer.criterion is not None
    for p, fisher in optimizer.criterion.parameter_fisher().items():
        if p in gradient:
            direction[p], image[p] = averaged[p] / fisher, averaged[p]
    for p, w in together.others(optimizer):
        direction[p], image[p] = w, gradient[p]
    return direction, image


def _of_block(optimizer: Riemannian, block: DiagonalBlock, given: list[Tensor]) -> Pair:
    group, state = optimizer._group[block.home], optimizer.state
    given = [v.to(dtype_of(block, state)) for v in given]
    whole = all(p.grad is not None for p in block.parameters)
    if optimizer.orthogonal and whole and block.mixes:
        return orthogonal.step(block, state, given)
    solve = block.solve if whole else block.solve_part
    d = solve(state, given, group["eps"], group["floor"])
    units = block.parameters[0].shape[0]
    return orthogonal.of_length(d, given, units) if optimizer.orthogonal else (d, given)


def _average_(state: dict[str, Any], g: Tensor) -> Tensor:
    """The average with this gradient, and once more with it (Nesterov). Its scale, short at first, does not matter."""
    average = state.setdefault("average", torch.zeros_like(g))
    average.lerp_(g, 1 - AVERAGING)
    return average.lerp(g, 1 - AVERAGING)


def descend_(optimizer: Riemannian, model: QuadraticModel) -> None:
    r""":math:`θ ← θ - α d + μ δ_-`. A group's ``lr`` multiplies the whole step of its parameters."""
    ranks = None if optimizer._exchange is None else optimizer._exchange.group
    factors = {p: float(group["lr"]) for p, group in optimizer._group.items()}
    factor = max(factors.values())
    gradient: Direction = {
        p: optimizer._gradient(p) for p in optimizer._group if p.grad is not None
    }
    direction, image = propose(optimizer, gradient)
    previous = {
        p: optimizer.state[p]["update"] for p in direction if "update" in optimizer.state[p]
    }
    if any(factors[p] != factor for p in direction):
        # The directions of a group with a smaller factor are that much shorter, and so are their images.
        ratio = {p: factors[p] / factor for p in direction}
        direction = {p: u.mul_(ratio[p]) for p, u in direction.items()}
        previous = {p: u * ratio[p] for p, u in previous.items()}
        image = {p: v * ratio[p] for p, v in image.items()}
    for p in optimizer._group:
        # Of a step before the last, where there is no new one.
        optimizer.state[p].pop("update", None)
    if not direction:
        return  # all that has a gradient waits for its metric
    others = set(optimizer._others)
    known = {p: u for p, u in direction.items() if p not in others}
    other = {p: u for p, u in direction.items() if p in others}
    fresh: list[dict[Tensor, Tensor]] = [u for u in (known, other) if u]
    named = {"new": known, "other": other, "last": previous}
    named = {name: u for name, u in named.items() if u}
    images: list[dict[Tensor, Tensor]] = [{p: image[p] for p in u} for u in fresh]
    report = model.report
    before = replace(report)
    whole = factor
    for left in reversed(range(ROUNDS)):
        vars(report).update(vars(before))
        best = model.coefficients(gradient, named, [*images, None][: len(named)], whole, ranks)
        excess = _excess(optimizer, [*named.values()], best, ranks) if optimizer.safeguard else {}
        if not excess or not left:
            break
        for u in (*named.values(), *images):
            for p in u.keys() & excess.keys():
                u[p] = u[p] / excess[p]
        whole = factor if left > 1 else factor / max(excess.values())
    mu = best[len(fresh)] if previous else 0.0
    for u, coefficient in zip(fresh, best if any(best) else []):
        for p, w in u.items():
            w.mul_(coefficient)
            if p in previous:
                w.add_(previous[p], alpha=mu)
            optimizer.state[p]["update"] = w
            p.add_(w.to(p.dtype))
    report.alpha = -best[0] if known else 0.0
    report.other = -best[len(fresh) - 1] if other else 0.0
    report.mu = mu
    report.factor = factor
    report.steps += 1


def _excess(
    optimizer: Riemannian, directions: Sequence[Direction], best: list[float], ranks: Any
) -> dict[Tensor, float]:
    """How many times too long the step may be, for the parameters of each layer where it is.

    Layers that begin at zero may move as far as others that do not: by about one for each unit.
    """
    blocks = [b for b in optimizer._blocks if any(p in directions[0] for p in b.parameters)]
    found = []
    for block in blocks:
        parts = [(c, [u[p] for p in block.parameters if p in u]) for c, u in zip(best, directions)]
        step = torch.stack([abs(c) * _size(moved) for c, moved in parts if moved]).sum()
        weights = _size([p.detach() for p in block.parameters])
        found.append(step / weights.clamp_min(block.parameters[0].shape[0] ** 0.5))
    together = [x.to(found[0].device) for x in found]
    excess = _mean(torch.stack(together).cpu(), ranks) / LONGEST if found else torch.zeros(0)
    return {p: float(e) for block, e in zip(blocks, excess) if e > 1 for p in block.parameters}


def _size(tensors: Sequence[Tensor]) -> Tensor:
    """Of all of them, as of one vector."""
    return torch.stack([torch.linalg.vector_norm(x).double() for x in tensors]).norm()


def _dot(covector: Direction, u: Direction) -> Tensor:
    """Over the parameters that both have, without waiting for a device more than once."""
    pairs = [(covector[p].flatten(), v.flatten()) for p, v in u.items() if p in covector]
    if not pairs:
        return torch.zeros((), dtype=torch.float64)
    dots = [torch.dot(v, w.to(v.dtype)) for v, w in pairs]
    return torch.stack([x.to(dots[0].device).double() for x in dots]).sum().cpu()


def _mean(numbers: Tensor, ranks: Any) -> Tensor:
    return numbers if ranks is None else distributed.mean(numbers, ranks)
