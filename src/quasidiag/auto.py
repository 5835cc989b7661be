r"""The step without a learning rate: length and momentum from the exact quadratic model.

With the Riemannian gradient :math:`d = M^{-1} g` and the previous update :math:`δ_-`, the step is
:math:`δ = -α d + μ δ_-` with the :math:`(α, μ)` that minimise

.. math:: g^⊤ δ + \tfrac12 δ^⊤ (F + λ M) δ,

where :math:`F` is the Fisher matrix of the minibatch itself, no approximation: :math:`u^⊤ F v = ‹Ju, F_\text{out} Jv›`
needs the derivatives of the outputs along two directions only. The damping :math:`λ` follows the ratio of actual to
predicted decrease (Levenberg–Marquardt). All of these numbers are geometric, so the step depends on how inputs and
activities are encoded no more than :math:`d` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quasidiag.outputs import OutputModel
from quasidiag.replay import Replay

#: The ratio of actual to predicted decrease is looked at every so many steps, and moves the damping by this factor.
CHECK_EVERY, DECAY = 5, 0.95**5
DAMPING = 1e-6, 1e4
#: Relative, on the diagonal of the two-by-two system: its directions may coincide.
RIDGE = 1e-6


@dataclass
class Report:
    """What the last step did. ``predicted`` and ``actual`` are changes of the loss, the latter when last looked at."""

    alpha: float = 0.0
    mu: float = 0.0
    damping: float = 1.0
    predicted: float = 0.0
    actual: float = float("nan")
    ratio: float = float("nan")
    #: The step's length in the metric, δᵀMδ.
    length: float = 0.0
    steps: int = 0


def minimiser(linear: Tensor, quadratic: Tensor) -> Tensor:
    r"""The coefficients *c* that minimise :math:`c·\text{linear} + \tfrac12 c^⊤ \text{quadratic}\, c`, in float64."""
    scale = quadratic.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    system = quadratic * scale * scale.unsqueeze(1)
    system = system + RIDGE * torch.eye(len(linear), dtype=torch.float64)
    return -scale * torch.linalg.solve(system, scale * linear)


class QuadraticModel:
    """Measures the model of the loss along given directions, and keeps the damping.

    Args:
        replay: runs the model again on a share of the minibatch.
        share: that share.
    """

    def __init__(self, replay: Replay, share: float, report: Report) -> None:
        self.replay, self.share, self.report = replay, share, report

    def step(
        self,
        gradient: Mapping[Tensor, Tensor],
        direction: Mapping[Tensor, Tensor],
        previous: Mapping[Tensor, Tensor],
        factor: float,
        group: object = None,
    ) -> tuple[float, float]:
        """The coefficients ``(-α, μ)`` of ``direction`` and ``previous``, times ``factor``."""
        directions = [direction, previous] if previous else [direction]
        linear = [sum(_dot(gradient[p], u[p]) for p in u) for u in directions]
        fisher = self._fisher(directions)
        numbers = torch.cat([torch.stack(linear).double().cpu(), fisher.flatten().cpu()])
        if group is not None:
            dist.all_reduce(numbers, group=group)
            numbers /= dist.get_world_size(group)
        k = len(directions)
        b, quadratic = numbers[:k], numbers[k:].view(k, k)
        metric = self._metric(b)
        best = minimiser(b, quadratic + self.report.damping * metric)
        if not bool(best.isfinite().all()):
            best = torch.zeros_like(best)
        best = best * factor
        self.report.predicted = float(b @ best + 0.5 * best @ quadratic @ best)
        self.report.length = float(best @ metric @ best)
        alpha, mu = float(best[0]), float(best[1]) if k > 1 else 0.0
        self.report.alpha, self.report.mu = -alpha, mu
        return alpha, mu

    def _fisher(self, directions: list[Mapping[Tensor, Tensor]]) -> Tensor:
        criterion: OutputModel = self.replay.criterion
        own = criterion.parameter_fisher()
        inner = [{p: u for p, u in d.items() if p not in own} for d in directions]
        output, target, moved = self.replay.tangents(inner, self.share)
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        counted = criterion.counted(output, target)
        if counted is not None:
            moved = [torch.where(counted, u, 0.0) for u in moved]
        terms = criterion.terms(output, target)
        rows = [
            [
                criterion.inner(output, u, v) / terms
                + sum((own[p] * du[p] * dv[p]).sum() for p in own if p in du and p in dv)
                for v, dv in zip(moved, directions)
            ]
            for u, du in zip(moved, directions)
        ]
        return torch.stack([torch.stack(row) for row in rows]).double()

    def _metric(self, linear: Tensor) -> Tensor:
        r"""The metric's own quadratic form: :math:`M d = g`, and :math:`δ_-^⊤ M δ_-` as the last step left it."""
        metric = torch.diag_embed(
            linear.new_tensor([float(linear[0]), self.report.length])[: len(linear)]
        )
        if len(linear) > 1:
            metric[0, 1] = metric[1, 0] = linear[1]
        return metric

    def look(self, group: object = None) -> None:
        """Compare the actual decrease with the predicted one, and move the damping."""
        report = self.report
        report.steps += 1
        if (report.steps - 1) % CHECK_EVERY or self.replay.loss is None:
            return
        change = (self.replay.value() - self.replay.loss).double().cpu()
        if group is not None:
            dist.all_reduce(change, group=group)
            change /= dist.get_world_size(group)
        report.actual = float(change)
        report.ratio = report.actual / report.predicted if report.predicted < 0 else -1.0
        low, high = DAMPING
        if report.ratio > 0.75:
            report.damping = max(report.damping * DECAY, low)
        elif not report.ratio >= 0.25:
            report.damping = min(report.damping / DECAY, high)

    def saved(self) -> dict[str, float]:
        return asdict(self.report)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten().to(a.dtype))
