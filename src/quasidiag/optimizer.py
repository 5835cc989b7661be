r"""The optimizer: :math:`θ ← θ - η M^{-1} v` with the metric's moving average :math:`M`, block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quasidiag import distributed, placeholder, together, validate
from quasidiag.auto import descent, rest, rhythm
from quasidiag.auto.penalty import Penalty, penalty
from quasidiag.auto.proposal import Plan
from quasidiag.auto.quadratic import QuadraticModel
from quasidiag.auto.replay import Replay
from quasidiag.auto.report import Report
from quasidiag.auto.stacks import Stacks
from quasidiag.blocks import DiagonalBlock
from quasidiag.collect import Collector, LossScale
from quasidiag.defaults import DEFAULTS, everything
from quasidiag.hidden import hidden
from quasidiag.moments import Moments, cast, full_precision
from quasidiag.outputs import OutputModel
from quasidiag.probe import Hook
from quasidiag.readiness import idle, ready, warn_of_others
from quasidiag.saving import STAYS, Saved
from quasidiag.sharding import is_sharded
from quasidiag.sums import Sums, dtype_of
from quasidiag.units import find_units


class Riemannian(Saved):
    r"""Riemannian gradient descent: each step, with the minibatch's gradient :math:`v` and metric :math:`M_b`,

    .. math::
        M &← (1-γ) M + γ M_b \\
        θ &← θ - η M^{-1} v

    where :math:`M^{-1}` is taken unit by unit (:mod:`quasidiag.reductions`). Without an ``lr``, which is what we recommend,
    direction and length come from :mod:`quasidiag.auto`. The training loop is the usual one::

        optimizer = Riemannian(model, criterion)  # or lr=1e-2: the paper's fixed step
        for x, t in loader:
            optimizer.zero_grad()
            criterion(model(x), t).backward()
            optimizer.step()

    Args:
        model: the model to train. Its layers are watched while it is in training mode.
        criterion: an output model (:mod:`quasidiag.outputs`). Without one, only the outer product metric can be used, and
            the loss may be any that is a mean (or sum, see ``loss_reduction``) over the batch.
        lr: the step size :math:`η`, a number or a tensor. If it is left out, ``step`` is ``"auto"``.
        step: ``"fixed"``, or ``"auto"``: the length comes from a model of the loss (:mod:`quasidiag.auto`), nothing
            needs tuning, and ``lr`` is a factor (1 by default) that schedulers may lower.
        metric: ``"outer-product"``, ``"monte-carlo"``, ``"exact"`` or ``"backpropagated"`` (:mod:`quasidiag.metrics`); by
            default the first, or the second with ``step="auto"``.
        reduction: ``"quasi-diagonal"``, ``"diagonal"`` or ``"unitwise"``.
        gamma: the weight :math:`γ` of each new minibatch in the moving average: 0.01, or 0.1 with ``step="auto"``.
        eps: added to the metric's diagonal: 1e-8, or 0 with ``step="auto"``, which has relative safeguards instead.
        floor: a lower bound on the solve's denominator; ``None`` means ``eps``, as in the paper, ``0.0`` none.
        samples: targets drawn per sample, for the Monte Carlo metric.
        momentum: the momentum factor, on the Riemannian gradient, as in ``torch.optim.SGD``.
        weight_decay: decoupled, as in AdamW; with ``step="auto"`` a part of the loss, as in SGD
            (:mod:`quasidiag.auto.penalty`). It breaks the invariance.
        maximize: maximize the loss instead of minimizing it.
        params: param groups as in ``torch.optim``, each with its own ``lr``, ``gamma``, ``eps``, ``floor``,
            ``momentum``, ``weight_decay``; by default one group of all trainable parameters of model and criterion.
        metric_start: ``"first"`` sets the metric to the first minibatch's, ``"identity"`` starts at the identity matrix, an
            integer *n* takes :math:`γ_t = \max(γ, 1/(t+1))` for the first *n* minibatches, which at first is a plain
            average. By default ``"first"``; with ``step="auto"`` this :math:`γ_t` throughout.
        metric_every: update the metric every this many steps: 1, or with ``step="auto"`` 8 or 16 (``auto.rhythm``).
        sharing: how a layer that is applied at several positions of a sample enters the metric (:mod:`quasidiag.sharing`):
            ``"expand"`` counts each position as one more occurrence, ``"exact"`` takes the whole sample's gradient,
            ``"reduce"`` an average position; ``"recurrent"``, the default with ``step="auto"``, is exact where layers recur.
        metric_fraction: the share of each minibatch that enters the metric (all of it in lookup tables): 1, or with
            ``step="auto"`` as many samples as matter (:mod:`quasidiag.strata`).
        step_fraction: the share on which ``step="auto"`` measures its quadratic model (:mod:`quasidiag.auto.quadratic`).
        step_every: ``step="auto"`` measures its quadratic model every this many steps, by default 6 or 18.
        orthogonal: whether ``step="auto"`` gives all directions of a layer's gradient the same strength
            (:mod:`quasidiag.auto.orthogonal`), the default, or follows the Riemannian gradient itself. ``eps`` and
            ``floor`` then have an effect only on what is not orthogonalised: unitwise blocks, and partly frozen layers.
        averaged: whether ``step="auto"`` leaves the model at an average of its recent parameters between two steps
            (:mod:`quasidiag.auto.rest`), the default; training itself is the same either way.
        safeguard: bounds on the metric relative to the mean of its unit and of its layer
            (:func:`quasidiag.reductions.safeguarded`); by default only with ``step="auto"``.
        loss_reduction: without a criterion, whether the loss is a ``"mean"`` or a ``"sum"`` over the batch.
        loss_scale: without a criterion, what the loss is multiplied by before its backward pass, and gradients are divided
            by before the step: a number, or a function such as ``torch.amp.GradScaler.get_scale``.
        seed: the seed of the generator that draws the Monte Carlo targets.
        nonfinite: a gradient that is not finite is left out with a warning (``"skip"``) or an error (``"raise"``).
        foreach: solve and update many tensors in one call (:mod:`quasidiag.together`, :mod:`quasidiag.auto.stacks`):
            ``True`` wherever possible, at the price of memory, ``False`` never, ``None`` for tensors that are not large.
        capturable: never wait for the device, for a step in a CUDA graph; it is not checked whether gradients are finite.
        process_group: the ranks whose samples enter the metric together. ``"auto"`` finds those of DDP or
            ``fully_shard``, or else takes all ranks; ``None`` keeps this rank to itself.

    Parameters outside the layers that quasidiag knows follow the diagonal rule of :class:`quasidiag.AdaGrad`. The
    gradients of the criterion's own parameters are divided by their Fisher information.

    The model may be compiled with ``torch.compile``, before or after the optimizer is made, if it is called for the first
    time after that; the graph breaks at every layer that is watched. The step itself runs outside of compiled graphs.
    """

    _fused = True  # kernels may take steps: nothing but the Riemannian gradient is in them

    def __init__(
        self,
        model: nn.Module,
        criterion: OutputModel | None = None,
        *,
        lr: float | Tensor | None = None,
        step: str | None = None,
        metric: str | None = None,
        reduction: str = "quasi-diagonal",
        gamma: float | None = None,
        eps: float | None = None,
        floor: float | None = None,
        samples: int = 1,
        sharing: str | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        params: Any = None,
        metric_start: str | int | None = None,
        metric_every: int | None = None,
        metric_fraction: float | None = None,
        step_fraction: float | None = None,
        step_every: int | None = None,
        orthogonal: bool | None = None,
        averaged: bool | None = None,
        safeguard: str | tuple[float, float, float] | None = "default",
        loss_reduction: str = "mean",
        loss_scale: LossScale = 1.0,
        seed: int = 0,
        nonfinite: str = "skip",
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = "auto",
    ) -> None:
        validate.model(model)
        step = step or ("auto" if lr is None else "fixed")
        validate.one_of("step", step, DEFAULTS)
        chosen = DEFAULTS[step].but(
            lr=lr,
            metric=metric,
            orthogonal=orthogonal,
            averaged=averaged,
            gamma=gamma,
            eps=eps,
            metric_start=metric_start,
            metric_every=metric_every,
            metric_fraction=metric_fraction,
            sharing=sharing,
            step_every=step_every,
        )
        validate.options(
            reduction=reduction,
            loss_reduction=loss_reduction,
            nonfinite=nonfinite,
            samples=samples,
            seed=seed,
            step_fraction=step_fraction,
            **chosen._asdict(),
        )
        validate.flags(foreach=foreach, orthogonal=orthogonal, averaged=averaged)
        if step == "auto":
            validate.auto(model, criterion, capturable, params)
        elif orthogonal:
            raise ValueError("orthogonal directions have no length: only step='auto' has them")
        elif averaged:
            raise ValueError("only step='auto' averages where its steps led")
        validate.criterion(criterion, chosen.metric, loss_reduction)
        self.auto = Report() if step == "auto" else None
        self.safeguard = validate.safeguard(safeguard, chosen.safeguard)
        self.metric, self.metric_start = chosen.metric, chosen.metric_start
        self.orthogonal, self.averaged = chosen.orthogonal, chosen.averaged
        self.metric_every, self.step_every = chosen.metric_every, chosen.step_every
        self.model, self.criterion, self.reduction = model, criterion, reduction
        self.metric_fraction, self.step_fraction = chosen.metric_fraction, step_fraction
        self.samples, self.seed, self.sharing, self.foreach = samples, seed, chosen.sharing, foreach
        self.loss_reduction, self.loss_scale = loss_reduction, loss_scale
        self.nonfinite, self.capturable, self.process_group = nonfinite, capturable, process_group
        self.steps, self.whole = 0, params is None
        defaults = dict(
            lr=chosen.lr,
            gamma=chosen.gamma,
            eps=chosen.eps,
            floor=floor,
            momentum=momentum,
            weight_decay=weight_decay,
            maximize=maximize,
        )
        super().__init__(everything(model, criterion) if params is None else params, defaults)
        self._attach()

    def _attach(self) -> None:
        """Watch the model; also called for a copied or unpickled optimizer, whose model was copied with it."""
        self._find()
        self._sums, self._idle, self._stacks = Sums(), idle(self), Stacks()
        self._plan: Plan | None = None
        #: Blocks that had a gradient but have no metric yet: until they do, every step updates the metric.
        self._late: set[DiagonalBlock] = set()
        self._collector = Collector(
            self.model,
            self.criterion,
            self.metric,
            self.samples,
            self.metric_fraction,
            self.loss_reduction,
            self.loss_scale,
            self.seed,
            self.sharing,
            Hook(self._before_pass),
        )
        self._watch()
        self._model = None
        if self.auto is not None:
            assert self.criterion is not None
            replay = Replay(self.model, self.criterion, [*self._group], self.auto)
            self._model = QuadraticModel(replay, self.step_fraction, self.auto)
            self._handle = self.model.register_forward_pre_hook(Hook(self._lead))
        self._count(self.steps)

    def _find(self) -> None:
        """Assign every parameter to a block, the criterion, or the diagonal rule."""
        self._group = {p: group for group in self.param_groups for p in group["params"]}
        self._units = find_units(self.model, self._group, self.reduction, self.sharing)
        self._blocks, self._owner = self._units.blocks, self._units.owner
        for block in self._blocks:
            validate.one_device(block)
            block.safeguard = self.safeguard
        covered = {p for block in self._blocks for p in block.parameters}
        if self.criterion is not None:
            covered |= set(self.criterion.parameter_fisher())
        self._others = [p for p in self._group if p not in covered]
        self._structure = validate.Structure(self.model)
        warn_of_others(self._others, self.model)

    def _watch(self) -> None:
        self._collector.watch(self._units)
        if self._collector.exchange is not None:
            self._collector.exchange.close()
        self._exchange = self._collector.exchange = distributed.connect(
            self.model,
            self._blocks,
            self._owner,
            lambda: self.state,
            self.process_group,
            self.criterion,
        )

    @hidden
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; its layers are watched from the next forward pass on.

        A block that gains a parameter (a bias that was frozen, say) starts its metric anew.
        """
        group = {**self.defaults, **param_group}
        for name in ("lr", "gamma", "eps", "floor", "momentum", "weight_decay"):
            validate.number(name, group[name])
        if self.auto is not None:
            validate.auto_group(group)
        if not isinstance(group["params"], Tensor):
            group["params"] = list(group["params"])
            plain = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
            validate.trainable((p for p in plain if isinstance(p, Tensor)), self.name_of)
        super().add_param_group(group)
        if hasattr(self, "_collector"):
            before = {block.home: block.parameters for block in self._blocks}
            self._find()
            for block in self._blocks:
                known = before.get(block.home, block.parameters)
                if [*map(id, known)] != [*map(id, block.parameters)]:
                    for p in block.parameters:
                        self.state[p] = {k: x for k, x in self.state[p].items() if k in STAYS}
            self._watch()
            self._restart()
            if self._model is not None:
                self._model.replay.parameters = [*self._group]

    @hidden
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the metric with the minibatch, then the parameters; returns the value of ``closure``, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if placeholder.wanted(self):
            placeholder.fill_(self)
            return loss
        try:
            self._step()
        finally:
            rest.settle_(self)
            self._stacks.sweep()
        self._forget()
        return loss

    def _step(self) -> None:
        with full_precision(next(iter(self._group)).device):
            usable = ready(self)
            if self._model is not None:
                self._model.replay.check()
                self._model.penalty = penalty(self)
                turn = descent.turn(self, self._model, usable)
                usable = not descent.retreat_(self, self._model, turn.judges, usable) and usable
            if usable and self._model is not None:
                self._update_metric()
                descent.descend_(self, self._model, turn.measures)
            elif usable:
                batches = together.batches(self)
                done = together.advance_(self, batches)
                self._update_metric()
                alone = (b for b in self._blocks if b not in (*batches, *done) and self._known(b))
                done |= {block for block in alone if together.descend_(self, block)}
                together.apply_(self, self._directions(batches, done))
            if usable:
                descent.project_(self)

    @hidden
    @torch.no_grad()
    def precondition_(self) -> None:
        """Update the metric and turn every ``.grad`` into the Riemannian gradient; another optimizer then takes the step.

        Of a minibatch that is skipped no gradient is left.
        """
        with full_precision(next(iter(self._group)).device):
            if not ready(self):
                self.zero_grad()
            else:
                self._update_metric()
                for parameter, w in self._directions():
                    assert parameter.grad is not None
                    parameter.grad.copy_(w)
                for p in (p for b in self._blocks if not self._known(b) for p in b.parameters):
                    p.grad = None if p.grad is None else p.grad.zero_()
        self._forget()

    def moments(self, layer: nn.Module | nn.Parameter) -> Moments:
        """The averaged moments of a layer; for one block of an LSTM or attention layer, pass the block's weight."""
        own = (b for b in self._blocks if any(p is layer for p in b.parameters))
        block = self._owner.get(layer) if isinstance(layer, nn.Module) else next(own, None)
        if block is None:
            raise KeyError(f"{type(layer).__name__} is not a layer that this optimizer watches")
        if "updates" not in self.state[block.home]:
            raise RuntimeError(f"{block.name} has no moments yet: take a step first")
        return block.moments(self.state)

    @property
    def generator(self) -> torch.Generator | None:
        """The generator of the Monte Carlo targets, ``None`` before the first draw; a CUDA graph must register it."""
        return self._collector.generator

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._restart()

    def _restart(self) -> None:
        """Drop what the backward passes so far have left: their gradients are gone."""
        self._collector.restart()
        self._sums.clear()
        if self._model is not None:
            self._model.replay.restart()

    def _before_pass(self) -> None:
        """When a backward pass begins: sum up the records of earlier ones if gradients accumulate, else drop them."""
        if placeholder.there(self):
            self.state.clear()
        accumulating = any(p.grad is not None or is_sharded(p) for p in self._group)
        if not accumulating:  # fully_shard hides gradients until they are reduced, so it may be
            self._restart()
        elif self._exchange is None:
            self._fold()

    def _lead(self, *_: Any) -> None:
        """When a forward pass begins in training: move from the averaged parameters to the current ones."""
        if self.model.training and torch.is_grad_enabled():
            rest.lead_(self)

    def _fold(self) -> None:
        for module, a, w in self._collector.records:
            self._sums.add(self.state, self._owner[module], module, a, w)
        self._collector.records = []

    def close(self) -> None:
        """Remove all hooks; with ``step="auto"`` the model is left at its average. The state can still be read and saved."""
        rest.settle_(self)
        self._collector.close()
        if self._model is not None:
            self._model.replay.close()
            self._handle.remove()

    def __enter__(self) -> Riemannian:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _started(self, block: DiagonalBlock) -> bool:
        return "updates" in self.state.get(block.home, {})

    def _known(self, block: DiagonalBlock) -> bool:
        """Whether a block has a metric or gets one in this step; one that was frozen so far may have to wait for it."""
        return self._collector.due or self._started(block)

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter in the model or the criterion."""
        return validate.name_of(parameter, self.model, self.criterion)

    def _update_metric(self) -> None:
        r""":math:`M ← (1-γ) M + γ M_b`."""
        alone = self._exchange is None  # else all ranks take part, whatever each has seen
        if not (self._collector.due and self._blocks) or (alone and not self._collector.passes):
            return
        factor = self._collector.factor()
        if self._exchange is not None:
            identity = self.metric_start == "identity"
            self._exchange.update(self._collector.records, factor, self._gamma, identity)
            return
        if self._sums:
            self._fold()
        fresh: set[DiagonalBlock] = set()
        gains: dict[float, float | Tensor] = {}  # computed once: on a GPU each is a kernel
        for module, a, w in self._collector.records:
            block = self._owner[module]
            self._start(block, a)
            gamma = self._gamma(block)
            gain = gains[gamma] = gains[gamma] if gamma in gains else gamma * factor
            keep = 1.0 if block in fresh else 1 - gamma
            block.accumulate_(self.state, module, a, w, keep, gain)
            fresh.add(block)
        for block in self._sums:
            self._start(block, self._sums.centre(block))
            gamma = self._gamma(block)
            self._sums.merge_(self.state, block, 1 - gamma, gamma * factor)
            fresh.add(block)
        for block in fresh:
            block.finish_update(self.state)

    def _start(self, block: DiagonalBlock, a: Tensor) -> None:
        if not self._started(block):
            block.start(self.state, a, dtype_of(block), self.metric_start == "identity")

    def _gamma(self, block: DiagonalBlock) -> float:
        t, group = self.state[block.home]["updates"], self._group[block.home]
        gamma = rhythm.weight(self, group["gamma"])
        if self.metric_start == "identity":
            return gamma
        first = 1 if self.metric_start == "first" else int(self.metric_start)
        return max(gamma, 1 / (t + 1)) if t < first else gamma

    def _directions(
        self,
        batches: dict[DiagonalBlock, list[DiagonalBlock]] | None = None,
        without: Collection[DiagonalBlock] = (),
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter that has a gradient, with its Riemannian gradient; not for the blocks in ``without``."""
        batches = together.batches(self) if batches is None else batches
        for block in self._blocks:
            batch = batches.get(block, [block])
            if block is not batch[0] or block in without or not self._known(block):
                continue
            if any(p.grad is not None for p in block.parameters):
                yield from together.solved(self, batch)
        if self.criterion is not None:
            for p, fisher in self.criterion.parameter_fisher().items():
                if p in self._group and p.grad is not None:
                    yield p, self._gradient(p) / (fisher + self._group[p]["eps"])
        yield from together.others(self)

    def _gradient(self, parameter: Tensor) -> Tensor:
        """The gradient of the mean loss, with that of a penalty, in the metric's precision; negated to maximize."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.grad is None:
            return torch.zeros_like(parameter, dtype=dtype)
        gradient = cast(parameter.grad, dtype)
        if self.criterion is None and self.loss_reduction == "sum":
            gradient = gradient / self._collector.total
        if self._model is None:
            return -gradient if self._group[parameter]["maximize"] else gradient
        return self._model.penalty.gradient(parameter, gradient)

    def _forget(self) -> None:
        """Drop all references to the batch, and count the step."""
        waiting = [block for block in self._blocks if not self._started(block)]
        self._late = {b for b in waiting if b in self._late or b.home.grad is not None}
        self._sums.clear()
        self._collector.clear()
        if self._model is not None:
            self._model.replay.clear()
            self._model.penalty = Penalty({})
        self._count(self.steps + 1)

    def _count(self, steps: int) -> None:
        # In the param group too, because torch.distributed.checkpoint saves only the state and the groups.
        self.steps = self.param_groups[0]["steps"] = steps
        self._collector.schedule(rhythm.metric_due(self) or bool(self._late))
        self._collector.next_step(steps)
