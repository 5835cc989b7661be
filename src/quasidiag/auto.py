r"""The step without a learning rate: length and momentum from the exact quadratic model.

With the Riemannian gradient :math:`d = M^{-1} g` and the previous update :math:`δ_-`, the step is
:math:`δ = -α d + μ δ_-` with the :math:`(α, μ)` that minimise

.. math:: g^⊤ δ + \tfrac12 δ^⊤ (F + λ M) δ,

where :math:`F` is the Fisher matrix of the minibatch itself, no approximation: :math:`u^⊤ F v = ‹Ju, F_\text{out} Jv›`
needs the derivatives of the outputs along two directions only. The damping :math:`λ` follows the ratio of actual to
predicted decrease (Levenberg–Marquardt), the actual one on the next minibatch, which the step has not seen; a step that
did harm there is taken back. All of these numbers are geometric, so the step depends on how inputs and
activities are encoded no more than :math:`d` does. Parameters outside of every block have no metric, only a diagonal
rule of another scale: they make a direction of their own, with a third coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quasidiag import distributed
from quasidiag.outputs import OutputModel
from quasidiag.replay import Batch, Replay

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

Direction = Mapping[Tensor, Tensor]

#: A ratio of actual to predicted decrease above this lets the damping fall by this factor, one below 0 lets it rise.
GOOD, DECAY = 0.25, 0.95
#: A step that raised the loss by this much more than it was to lower it is taken back, and the damping multiplied.
HARM, RETREAT = 1.0, 4.0
DAMPING = 1e-6, 1e4
#: Relative, on the diagonal of the system of the coefficients: the directions may coincide.
RIDGE = 1e-6


@dataclass
class Report:
    r"""What the last step did.

    Attributes:
        alpha: :math:`α`, the length along the Riemannian gradient.
        mu: :math:`μ`, the momentum.
        other: the length along the direction of the parameters that are in no block.
        damping: :math:`λ`.
        predicted: the change of the loss that the quadratic model expected of the last step.
        actual: the change that the step before brought, on the minibatch after it.
        ratio: of that to what was predicted.
        length: the step's length in the metric, :math:`δ^⊤ M δ`.
        steps: steps so far.
        retreats: how many of them were taken back.
        factor: the ``lr`` that the last step was multiplied by.
        samples: how many it saw, on the average rank.
    """

    alpha: float = 0.0
    mu: float = 0.0
    other: float = 0.0
    damping: float = 1.0
    predicted: float = 0.0
    actual: float = float("nan")
    ratio: float = float("nan")
    length: float = 0.0
    steps: int = 0
    retreats: int = 0
    factor: float = 1.0
    samples: float = 0.0


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
        directions: Sequence[Direction],
        images: Sequence[Direction | None],
        factor: float,
        ranks: Any = None,
    ) -> list[float]:
        r"""The best coefficient of each direction *u*, times ``factor``.

        ``images`` are the :math:`Mu`. The last update's is ``None``: of that the length is known, in the metric as it
        was then.
        """
        k = len(directions)
        linear = torch.stack([_dot(gradient, u) for u in directions])
        fisher = self._fisher(directions)
        # g and M are the same on all ranks, up to rounding; the minibatch is not.
        numbers = _mean(torch.cat([linear, fisher.flatten()]), ranks)
        linear, fisher = numbers[:k], numbers[k:].view(k, k)
        metric = self._metric(directions, images)
        best = minimiser(linear, fisher + self.report.damping * metric) * factor
        self.report.predicted = float(linear @ best + 0.5 * best @ fisher @ best)
        self.report.length = float(best @ metric @ best)
        return best.tolist()

    def _metric(
        self, directions: Sequence[Direction], images: Sequence[Direction | None]
    ) -> Tensor:
        known = [i for i, image in enumerate(images) if image is not None]
        metric = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        for i in known:
            for j, u in enumerate(directions):
                metric[i, j] = metric[j, i] = _dot(images[i] or {}, u)
        for i in set(range(len(directions))) - set(known):
            # As it was then; no less than what it shares with the other directions now.
            shared = sum(float(metric[i, j] ** 2 / metric[j, j]) for j in known if metric[j, j] > 0)
            metric[i, i] = max(self.report.length, shared)
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

    def _form(self, batch: Batch, directions: Sequence[Direction]) -> Tensor:
        r""":math:`‹Ju, F_\text{out} Jv›` on a share of a minibatch."""
        criterion: OutputModel = self.replay.criterion
        output, target, moved = self.replay.tangents(batch, directions, self.share)
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
        start = {p: p.detach() - u.to(p.dtype) for p, u in update.items()}
        pairs = [(w * b.loss, w * self.replay.value(b, start)) for w, b in self.replay.weighted()]
        now, before = (torch.stack(values).sum().double().cpu() for values in zip(*pairs))
        now, before = _mean(torch.stack([now, before]), ranks)
        if not before.isfinite():
            return False  # the data are to blame
        report.actual = float(now - before)
        report.ratio = report.actual / -abs(report.predicted) if report.predicted else 0.0
        low, high = DAMPING
        harm = not report.ratio > -HARM
        if harm:
            # 1/α is the curvature that the step found, relative to M: damped by as much, the next is half as long.
            found = report.factor / report.alpha if report.alpha > 0 else low
            report.damping = min(max(report.damping * RETREAT, found), high)
        elif report.ratio > GOOD:
            report.damping = max(report.damping * DECAY, low)
        elif report.ratio < 0:
            report.damping = min(report.damping / DECAY, high)
        return harm


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


def descend_(optimizer: Riemannian, model: QuadraticModel) -> None:
    r""":math:`θ ← θ - α d + μ δ_-`. A group's ``lr`` multiplies the whole step of its parameters."""
    ranks = None if optimizer._exchange is None else optimizer._exchange.group
    factors = {p: float(group["lr"]) for p, group in optimizer._group.items()}
    factor = max(factors.values())
    direction: dict[Tensor, Tensor] = dict(optimizer._directions())
    gradient: Direction = {p: optimizer._gradient(p) for p in direction}
    previous = {
        p: optimizer.state[p]["update"] for p in direction if "update" in optimizer.state[p]
    }
    image: Direction = gradient
    if any(factors[p] != factor for p in direction):
        # The directions of a group with a smaller factor are that much shorter, and so are their images.
        ratio = {p: factors[p] / factor for p in direction}
        direction = {p: u.mul_(ratio[p]) for p, u in direction.items()}
        previous = {p: u * ratio[p] for p, u in previous.items()}
        image = {p: g * ratio[p] for p, g in gradient.items()}
    others = set(optimizer._others)
    known = {p: u for p, u in direction.items() if p not in others}
    other = {p: u for p, u in direction.items() if p in others}
    fresh: list[dict[Tensor, Tensor]] = [u for u in (known, other) if u]
    directions: list[Direction] = [*fresh, previous] if previous else [*fresh]
    images: list[Direction | None] = [{p: image[p] for p in u} for u in fresh]
    best = model.coefficients(
        gradient, directions, [*images, None][: len(directions)], factor, ranks
    )
    mu = best[len(fresh)] if previous else 0.0
    for u, coefficient in zip(fresh, best):
        for p, w in u.items():
            w.mul_(coefficient)
            if p in previous:
                w.add_(previous[p], alpha=mu)
            optimizer.state[p]["update"] = w
            p.add_(w.to(p.dtype))
    report = model.report
    report.alpha = -best[0] if known else 0.0
    report.other = -best[len(fresh) - 1] if other else 0.0
    report.mu = mu
    report.factor = factor
    report.steps += 1


def _dot(covector: Direction, u: Direction) -> Tensor:
    """Over the parameters that both have, without waiting for a device more than once."""
    pairs = [(covector[p].flatten(), v.flatten()) for p, v in u.items() if p in covector]
    if not pairs:
        return torch.zeros((), dtype=torch.float64)
    dots = [torch.dot(v, w.to(v.dtype)) for v, w in pairs]
    return torch.stack([x.to(dots[0].device).double() for x in dots]).sum().cpu()


def _mean(numbers: Tensor, ranks: Any) -> Tensor:
    return numbers if ranks is None else distributed.mean(numbers, ranks)
