r"""The step without a learning rate: its length from the quadratic model of the loss, with the exact Fisher matrix.

With a direction :math:`d`, the averaged gradient orthogonalised in the coordinates of the metric
(:mod:`quasidiag.auto.proposal`), the step is :math:`δ = -α d` with the :math:`α` that minimises the quadratic model of the
loss (:mod:`quasidiag.auto.quadratic`). The model depends on how inputs and activities are encoded no more than :math:`d`
does, so neither does the step.

The model is measured in each of the first steps and then in every few (:mod:`quasidiag.auto.rhythm`), and the steps since
the last measurement are judged there. In between, a step follows its own :math:`d` with the same :math:`α`, or less where
the slope is smaller. A minibatch whose loss is a surprise is measured at once. The echo, what the step after a measured one
finds left of the slope, tells whether minibatches have their curvature in common: steps may then be longer.

Parameters outside of every block have no metric, only a diagonal rule of another scale: they get a direction of their
own, with a second coefficient. Those of the criterion (standard deviations) have a Fisher matrix in closed form, and take
a part of their natural step: such a deviation is then an average of the errors of the last minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quasidiag import together
from quasidiag.auto import bounce, rest, rhythm
from quasidiag.auto.directions import Direction, before_way, dot, dots, gathered, means
from quasidiag.auto.moving import move_
from quasidiag.auto.proportions import echoes, further, measured, weights
from quasidiag.auto.proposal import Proposal, part_of, proportioned, propose, ranks_of, stacks_of
from quasidiag.auto.quadratic import QuadraticModel
from quasidiag.auto.report import WHOLE, Report
from quasidiag.auto.stacks import in_order
from quasidiag.blocks import DiagonalBlock
from quasidiag.sums import dtype_of

if TYPE_CHECKING:
    from quasidiag.optimizer import Riemannian

#: A minibatch is small if its loss has :math:`n < N` terms: ``FULL``, or ``EACH`` for each class if that is more. A
#: direction that it contributed to is steeper for it than for any other, so its step is shorter, by :math:`\sqrt{n/N}`. Not
#: if it has the same data as the last one, as in full-batch training: then there is no sampling noise.
FULL, EACH = 500, 5
#: Where minibatches have their curvature in common, steps are longer by up to a factor of ``LONGER``; after ``SOON`` steps
#: what it has in excess of 1 falls with the number of steps.
LONGER, SOON = 1.4, 100
#: Relative difference up to which two fingerprints are those of the same samples, in whatever order.
SAME = 1e-9
#: No layer moves by more than ``LONGEST`` times its own weights, as lengths in the metric: one that hardly matters yet
#: would move far, where nothing is linear any more. Among norms, which make up for how large weights are, the bound is
#: ``NORMED``, and holds for layers with a small part of the others' weights as well, down to ``LEAST``. A direction is
#: shortened for that and measured again, up to ``ROUNDS`` measurements in all.
LONGEST, NORMED, LEAST, ROUNDS = 0.7, 0.3, 0.1, 3
#: Relative change of the weight decay from which on the model is measured anew: by a factor of two.
OTHERWISE = 0.5


class Turn(NamedTuple):
    """What a step does besides moving."""

    measures: bool
    judges: bool


def turn(optimizer: Riemannian, model: QuadraticModel, usable: bool) -> Turn:
    """Whether this step measures the model, and judges the steps since it was last measured.

    It does if its turn has come, if it differs from the last measured one, or if its loss is a surprise. A minibatch does
    not judge if its loss is finite but its gradient is not, nor if it has less than half the samples of the last one, as at
    the end of an epoch, nor if the weight decay was changed. In the first two cases it leaves a measurement that is due to
    the next, unless ``step_every`` is 1.
    """
    report, before = model.report, model.report.samples
    report.samples, loss = model.size(ranks_of(optimizer))
    surprised, same = report.surprised(loss), _same_penalty(optimizer, report)
    judge = report.samples >= before / 2 and (usable or not math.isfinite(loss)) and same
    early = (
        report.steps < rhythm.AT_FIRST
        or not report.steady
        or not (same and _alike(optimizer, report))
    )
    if early or surprised:
        report.proven = 0  # what was proven may no longer hold
    if early:
        return Turn(True, judge)
    due = surprised or report.stride >= rhythm.step_every(optimizer)
    return Turn(due and (judge or optimizer.step_every == 1), due and judge)


def _alike(optimizer: Riemannian, report: Report) -> bool:
    """Whether this step moves the same parameters as the last measured one, with the same proportions of their ``lr``."""
    parts, state = _parts(optimizer), optimizer.state
    close = len(parts) == len(report.parts) and all(map(math.isclose, parts, report.parts))
    # What is in no layer has no update if its direction was not followed.
    still = {*optimizer._others} if report.coefficients.get("other") == 0 else set()
    moving = [p for p in optimizer._group if p not in still] if still else [*optimizer._group]
    changed = [p for p in moving if ("update" in state[p]) is (p.grad is None)]
    return close and not changed


def _same_penalty(optimizer: Riemannian, report: Report) -> bool:
    """Whether the weight decay is about what it was at the last measurement: steps are not judged by another loss."""
    decays = _decays(optimizer)
    alike = (math.isclose(x, y, rel_tol=OTHERWISE) for x, y in zip(decays, report.decays))
    return len(decays) == len(report.decays) and all(alike)


def _decays(optimizer: Riemannian) -> list[float]:
    """The weight decay of each param group."""
    return [float(group["weight_decay"]) for group in optimizer.param_groups]


def _parts(optimizer: Riemannian) -> list[float]:
    """The ``lr`` of each param group, relative to the largest."""
    factors, largest = [float(group["lr"]) for group in optimizer.param_groups], _largest(optimizer)
    return [factor / largest if largest else 1.0 for factor in factors]


def _largest(optimizer: Riemannian) -> float:
    """The largest ``lr`` of all param groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def retreat_(optimizer: Riemannian, model: QuadraticModel, judges: bool, usable: bool) -> bool:
    """Undo the steps since the last measurement if they did harm; the gradient of this minibatch is then of no use."""
    report = model.report
    if not (judges or (usable and report.mixed)):
        return False
    update = _way(optimizer)
    harm = bool(update) and judges and model.judge(update, ranks_of(optimizer))
    if not harm and not (update and usable and _overshot(optimizer, model)):
        return False
    for p, before in before_way(update).items():
        if p.requires_grad:  # one frozen since then stays where it is
            p.copy_(before)
            rest.back_(optimizer.state[p])  # or the average would still have the bad steps in it
        del optimizer.state[p]["update"]
    report.length, report.stride, report.steady, report.proven = 0.0, 0, False, 0
    report.retreats += 1
    model.replay.look_again()
    return True


def _overshot(optimizer: Riemannian, model: QuadraticModel) -> bool:
    """Whether the steps since the last measurement went more than twice as far as they should, by the slope along them.

    Asked only where another loss than the criterion's is backpropagated as well: the judge does not see that one, nor does
    the quadratic model.
    """
    report = model.report
    if not (report.mixed and report.stride and report.fall < 0):
        return False
    if not _same_penalty(optimizer, report):
        return False
    echo = sum(_slopes(optimizer, _gradients(optimizer))) / (report.stride * report.fall)
    if echo >= -1:
        return False
    model.shorten(1 / (1 - echo))
    return True


def _gradients(optimizer: Riemannian) -> dict[Tensor, Tensor]:
    """The gradient of each parameter that has one."""
    return {p: optimizer._gradient(p) for p in optimizer._group if p.grad is not None}


def own(optimizer: Riemannian, gradient: Direction) -> dict[Tensor, Tensor]:
    """The direction of the criterion's own parameters, their natural gradient."""
    assert optimizer.criterion is not None
    fishers = optimizer.criterion.parameter_fisher()
    return {p: gradient[p] / fisher for p, fisher in fishers.items() if p in gradient}


def lengths(optimizer: Riemannian, directions: Sequence[Direction]) -> Tensor:
    r"""The products :math:`u^⊤ M v` of all pairs of directions, for each layer and then for each parameter in no layer."""
    each = _forms(optimizer, _moving(optimizer, directions), directions)
    others = []
    for p, metric in _diagonal(optimizer).items():
        rows = torch.stack([part_of(u, p, metric.dtype).flatten() for u in directions])
        others.append(rows @ (metric.flatten() * rows).T)
    return torch.cat([each, gathered(others)]) if others else each


def _forms(
    optimizer: Riemannian, blocks: Sequence[DiagonalBlock], directions: Sequence[Direction]
) -> Tensor:
    r"""The products :math:`u^⊤ M v` of all pairs of directions, for each layer."""
    state, k = optimizer.state, len(directions)
    if not blocks:
        return torch.zeros(0, k, k, dtype=torch.float64)
    steps = [
        {b: [part_of(u, p, dtype_of(b, state)) for p in b.parameters] for b in blocks}
        for u in directions
    ]
    stacks = stacks_of(optimizer, blocks)
    if k == 1:
        known = measured(stacks, state, {b: b.rows_of(w) for b, w in steps[0].items()})
        if known is not None:
            totals = [known[block].total for block in blocks]
            return torch.tensor(totals, dtype=torch.float64).view(-1, 1, 1)
    found = [stack.forms(state, [[u[b] for b in stack.blocks] for u in steps]) for stack in stacks]
    return in_order(blocks, stacks, found)


def _moving(optimizer: Riemannian, directions: Sequence[Direction]) -> list[DiagonalBlock]:
    """The layers that the directions have a part in."""
    return [
        block
        for block in optimizer._blocks
        if optimizer._known(block) and any(p in u for u in directions for p in block.parameters)
    ]


def _diagonal(optimizer: Riemannian) -> dict[Tensor, Tensor]:
    """The diagonal metric of the parameters that are in no block."""
    found: dict[Tensor, Tensor] = {}
    for p in optimizer._others:
        if "square" in optimizer.state[p]:
            found[p] = optimizer.state[p]["square"].sqrt() + optimizer._group[p]["eps"]
    return found


def descend_(optimizer: Riemannian, model: QuadraticModel, measures: bool) -> None:
    r"""Take the step :math:`θ ← θ - α d`. A group's ``lr`` multiplies the whole step of its parameters."""
    if measures:
        bounce.ask(optimizer, model, ranks_of(optimizer))
    report, parts, factor = model.report, _parts(optimizer), _factor(optimizer, model)
    gradient: Direction = _gradients(optimizer)
    other: dict[Tensor, Tensor] = dict(together.others(optimizer))
    if report.stride == 1:
        _listen(optimizer, report, gradient)
    proposal = propose(optimizer, gradient, measures)
    named = {"new": proposal.direction, "other": other}
    named = {name: u for name, u in named.items() if u}
    known = own(optimizer, gradient)
    if not all(part == 1 for part in parts):
        proposal = proposal._replace(slopes={})
    largest = _divide_(optimizer, named, known, parts)
    if measures:
        for p in _way(optimizer):
            del optimizer.state[p]["update"]
        rest.mark_(optimizer)
        steep = dot(gradient, known)
        best = _measure(optimizer, model, gradient, named, proposal, factor, largest, steep)
        report.stride, report.parts, report.decays = 0, parts, _decays(optimizer)
    else:
        if report.shortened:  # with a larger factor layers would go too far
            factor = min(factor, report.factor)
        again = model.again(gradient, named, proposal.slopes, factor, largest, ranks_of(optimizer))
        best = dict(zip(named, again))
    if not named and not known:
        return  # all layers that have a gradient still wait for their metric
    part = model.part(factor) if known else 0.0
    if known:
        assert optimizer.criterion is not None
        named["own"] = {p: optimizer.criterion.along(p, -part * w) for p, w in known.items()}
        best["own"] = float(part > 0)
    for name, u in named.items():
        if best[name]:  # a direction that is not followed may not be finite
            # The criterion's own parameters still have to be brought into their bounds, so they do not settle yet.
            move_(optimizer, u, best[name], settles=name != "own")
    if measures:
        report.falls, report.extent = _slopes(optimizer, gradient), factor * report.damped
    report.alpha, report.other = (-best.get(name, 0.0) for name in ("new", "other"))
    report.own = part
    report.factor = factor
    report.steps += 1
    report.stride += 1


def _divide_(
    optimizer: Riemannian,
    named: dict[str, dict[Tensor, Tensor]],
    known: dict[Tensor, Tensor],
    parts: list[float],
) -> dict[str, float]:
    """Multiply each parameter's part of a direction by its group's ``lr`` relative to the largest in that direction.

    Returns that largest ``lr`` of each direction, relative to the largest of all; its length has to be multiplied by it.
    """
    if all(part == 1 for part in parts):
        return dict.fromkeys(named, 1.0)
    part_of = {p: part for g, part in zip(optimizer.param_groups, parts) for p in g["params"]}
    largest = {name: max(part_of[p] for p in u) for name, u in named.items()}
    for name, u in {**named, "own": known}.items():
        for p in u:
            part = part_of[p] / (largest.get(name, 1.0) or 1.0)
            u[p] = u[p] if part == 1 else u[p] * part
    return largest


def project_(optimizer: Riemannian) -> None:
    """Bring the criterion's parameters into their bounds, and correct ``update`` and average by what that changed."""
    if optimizer.criterion is None:
        return
    own = [p for p in optimizer.criterion.parameters() if "update" in optimizer.state.get(p, {})]
    before = [p.clone() for p in own]
    optimizer.criterion.project_()
    for p, old in zip(own, before):
        optimizer.state[p]["update"].add_(p - old)
        rest.correct_(optimizer, p, p - old)


def _factor(optimizer: Riemannian, model: QuadraticModel) -> float:
    """What the step is multiplied by.

    The largest ``lr``, less for the first steps and for the noise of a small minibatch, more where minibatches have their
    curvature in common: for a while, or as long as the bounce is small.
    """
    report, before = model.report, model.report.data
    factor = _largest(optimizer)
    at_first = (LONGER / max(1.0, factor) - 1) * SOON / max(SOON, report.steps)
    longer = max(0.0, at_first, math.exp(report.longer) / max(1.0, factor) - 1)
    factor *= report.warmth * (1 + longer * report.common)
    full = max(FULL, EACH * model.replay.classes())
    terms, report.data = model.content(full, ranks_of(optimizer))
    same = math.isclose(report.data, before, rel_tol=SAME)
    report.small = 1.0 if same else min(1.0, math.sqrt(terms / full))
    return factor * report.small


def _slopes(optimizer: Riemannian, gradient: Direction) -> list[float]:
    """The slope along each layer's steps since the last measurement; at the end, that of the parameters in no layer."""
    way, own = _way(optimizer), set(optimizer.criterion.parameters() if optimizer.criterion else ())
    layers: list[Sequence[Tensor]] = [block.parameters for block in optimizer._blocks]
    layers.append([p for p in optimizer._others if p not in own])
    parts = [{p: way[p] for p in layer if p in way} for layer in layers]
    return [*means(dots(gradient, parts), ranks_of(optimizer))]


def _listen(optimizer: Riemannian, report: Report, gradient: Direction) -> None:
    """Take in the echoes of the last step, a measured one: what this minibatch finds left of the slope along it.

    A layer without a gradient, or in a group with an ``lr`` of ``WHOLE`` or less, has none.
    """
    slopes, blocks = _slopes(optimizer, gradient), optimizer._blocks
    if len(slopes) != len(report.falls) or not all(map(math.isfinite, slopes)):
        return
    complete = all(p in gradient for p in _way(optimizer))
    if report.listens and complete and _largest(optimizer) <= 1:
        report.heard(sum(slopes))
    if not proportioned(optimizer):
        return
    if not len(report.echoes) == len(report.further) == len(blocks):
        report.echoes, report.further = [0.0] * len(blocks), [0.0] * len(blocks)
    falls = [
        fall
        if all(p in gradient and float(optimizer._group[p]["lr"]) > WHOLE for p in b.parameters)
        else 0.0
        for b, fall in zip(blocks, report.falls)
    ]
    report.echoes = echoes(report.echoes, slopes[:-1], falls)
    report.further = further(report.further, report.echoes, falls)


def _measure(
    optimizer: Riemannian,
    model: QuadraticModel,
    gradient: Direction,
    named: dict[str, dict[Tensor, Tensor]],
    proposal: Proposal,
    factor: float,
    largest: dict[str, float],
    steep: float,
) -> dict[str, float]:
    """The coefficients that minimise the model; directions along which a layer would move too far are shortened."""
    ranks, report = ranks_of(optimizer), model.report
    if not named:
        report.steady, report.promise, report.predicted, report.length = False, 0.0, 0.0, 0.0
        return {}
    before, whole = replace(report), factor
    shortened: dict[Tensor, float] = {}
    for left in reversed(range(ROUNDS)):
        report.restore(before)
        each = lengths(optimizer, [*named.values()])
        along = proposal.slopes if left == ROUNDS - 1 else {}
        best = model.coefficients(gradient, named, along, each.sum(0), whole, largest, steep, ranks)
        blocks = _moving(optimizer, [*named.values()])
        excess = _excess(optimizer, blocks, proposal.weights, each, best, ranks)
        if not excess or not left:
            break
        for u in named.values():
            for p in u.keys() & excess.keys():
                u[p] = u[p] / excess[p]
        shortened = {p: excess.get(p, 1.0) * shortened.get(p, 1.0) for p in excess | shortened}
        whole = factor if left > 1 else factor / max(excess.values())
    # Still too long: a trial may have shortened the step of the last round more.
    part = 1 / max(excess.values()) if excess else 1.0
    best = [x * part for x in best]
    # Directions that are not followed now, because the others do more, are none in the next steps either.
    followed = [name for name in named if report.coefficients[name]] or [*named]
    down = all(report.slopes[name] > 0 > report.coefficients[name] for name in followed)
    # The next steps, which are not measured, are shortened as this one was.
    report.shortened = [shortened.get(b.parameters[0], 1.0) for b in blocks] if shortened else []
    part *= whole / factor if factor else 1.0
    report.coefficients = {name: part * x for name, x in report.coefficients.items()}
    report.steady = down and not report.doubt and (not shortened or proportioned(optimizer))
    return dict(zip(named, best))


def _excess(
    optimizer: Riemannian,
    blocks: Sequence[DiagonalBlock],
    known: Tensor | None,
    each: Tensor,
    best: list[float],
    ranks: Any,
) -> dict[Tensor, float]:
    r"""How many times too long the step is, for the parameters of each layer where it is too long.

    That is :math:`‖δ‖_M` over ``LONGEST`` times :math:`\sqrt{\text{units}}\, ρ`, the length of the layer's weights in the
    metric (:mod:`quasidiag.auto.proportions`). For a layer with a smaller :math:`ρ` than the mean, such as one that begins
    at zero, the mean counts, now or when training began, whichever is larger: a weight must be able to cross zero.

    In a network with norms it is over ``NORMED`` times the layer's own weights, if they are not zero, or ``LEAST`` times the
    mean, if that is more. The gains of norms, and lookup tables, which may be many times larger than other weights there,
    count neither for themselves nor in the mean.
    """
    assert optimizer.auto is not None
    if not blocks:
        return {}
    if known is None:
        known = weights(blocks, stacks_of(optimizer, blocks), optimizer.state)
    own = known.tolist()
    full = [block.adapter.full for block in blocks]
    normed = any(full) and any(block.adapter.normalises for block in blocks)
    logs = [math.log(x) for x, many in zip(own, full) if x > 0 and (many or not normed)]
    usual = math.exp(sum(logs) / len(logs)) if logs else math.nan  # then there is no bound
    if not optimizer.auto.footing and usual > 0:
        optimizer.auto.footing = usual
    usual = max(usual, optimizer.auto.footing)
    moved = each[: len(blocks)].diagonal(dim1=1, dim2=2).tolist()
    steps = [sum(math.sqrt(max(x, 0.0)) * abs(by) for x, by in zip(of, best)) for of in moved]
    units = [max(1, block.units) for block in blocks]
    if normed:
        floor = LEAST**2 * usual
        counts = [max(x, floor) if many and x else usual for x, many in zip(own, full)]
    else:
        counts = [max(usual, x) for x in own]
    longest = NORMED if normed else LONGEST
    most = [longest * math.sqrt(n * x) for n, x in zip(units, counts)]
    excess = [step / x for step, x in zip(steps, most)]
    of = zip(blocks, means(excess, ranks))
    return {p: ratio for block, ratio in of if ratio > 1 for p in block.parameters}


def _way(optimizer: Riemannian) -> dict[Tensor, Tensor]:
    """The sum of each parameter's updates since the model was last measured."""
    state = optimizer.state
    return {p: state[p]["update"] for p in optimizer._group if "update" in state[p]}
