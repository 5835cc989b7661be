r"""From forward and backward passes to weighted activities: what the metric is made of.

A :class:`Collector` watches a model train and keeps, until the optimizer's step, a list of :class:`Record`: a layer, its
activity ``a`` and the weights ``w``, such that the sum of :math:`w (1, a)(1, a)^⊤` over all of them is the metric of the
minibatch. Which vectors were backpropagated to get ``w`` is all that the metrics differ in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.utils.hooks import RemovableHandle

from quasidiag import backpropagated, kernels
from quasidiag.layers import Adapter
from quasidiag.metrics import cotangents
from quasidiag.outputs import OutputModel
from quasidiag.probe import Hook, Probe, Seen, Use
from quasidiag.sharding import unsharded

if TYPE_CHECKING:
    from quasidiag.distributed import Exchange

LossScale = float | Tensor | Callable[[], float | Tensor]


class Record(NamedTuple):
    """One call of a layer, as the metric sees it."""

    module: nn.Module
    a: Tensor
    w: Tensor


@dataclass
class Pass:
    """A backward pass under way: its loss's gradient is ``1/scale`` times that of the samples' sum."""

    scale: float | Tensor
    terms: int | Tensor
    losses: int = 1
    calls: set[int] = field(default_factory=set)

    def samples(self) -> int | float | Tensor:
        """How many samples there were. Several losses of one call of the model speak of the same samples."""
        extra = self.losses / max(1, min(self.losses, len(self.calls)))
        return self.terms if extra == 1 else self.terms / extra


class Collector:
    """Watches ``model`` and ``criterion``; see the module.

    Args:
        model: the model that is trained.
        criterion: the output model, or ``None`` for the outer product metric of any loss.
        metric: one of ``metrics.METRICS``.
        samples: draws per sample, for the Monte Carlo metric.
        fraction: the share of each minibatch that enters the metric.
        loss_reduction: what the loss does over the batch, where there is no criterion to know it.
        loss_scale: what the loss is multiplied by before its backward pass, where there is no criterion to see it.
        seed: of the generator that the Monte Carlo targets are drawn from.
        before_pass: called when a backward pass begins, before it leaves any record.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: OutputModel | None,
        metric: str,
        samples: int = 1,
        fraction: float = 1.0,
        loss_reduction: str = "mean",
        loss_scale: LossScale = 1.0,
        seed: int = 0,
        before_pass: Callable[[], None] | None = None,
    ) -> None:
        self.criterion, self.metric, self.samples = criterion, metric, samples
        self.fraction, self.loss_reduction, self.loss_scale = fraction, loss_reduction, loss_scale
        self.seed, self.before_pass = seed, before_pass
        self.generator: Generator | None = None
        #: Of the backward pass since the last step, or the last of several.
        self.records: list[Record] = []
        #: The other ranks, where there are any; takes the records as they come (:mod:`quasidiag.distributed`).
        self.exchange: Exchange | None = None
        self.step = 0
        #: Whether this step's minibatch enters the metric.
        self.due = True
        #: Backward passes since the last step, and the samples in them.
        self.passes = 0
        self.total: int | float | Tensor = 0
        self._pass: Pass | None = None
        self._handles: list[RemovableHandle] = []
        along = self._deliver if metric == "outer-product" else None
        self.probe = Probe(model, along, self._reached if criterion is None else None)
        if criterion is not None:
            Hook.sweep(criterion)
            self._handles.append(criterion.register_forward_hook(Hook(self._judged)))

    def watch(self, adapters: dict[nn.Module, Adapter]) -> None:
        """Watch these layers and no others, from the next forward pass on."""
        self.probe.watch((module, adapter.activity) for module, adapter in adapters.items())

    def schedule(self, due: bool) -> None:
        """Say whether the next step's minibatch enters the metric. A summed loss has its samples counted anyway."""
        self.due = due
        self.probe.enabled = due or (self.criterion is None and self.loss_reduction == "sum")

    def factor(self) -> float | Tensor:
        r"""What makes the sum over the records a mean over samples.

        Without a criterion, the loss of each of *k* passes is taken to be divided by *k*, as is the custom when
        gradients are accumulated.
        """
        if self.criterion is None and self.loss_reduction == "mean":
            return self.passes**2 / self.total
        return 1 / self.total

    def _reached(self, batch: int) -> None:
        """A backward pass reaches the model's output, of a loss that nobody knows more about."""
        if self._pass is None:
            given = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
            self._begin(Pass((batch if self.loss_reduction == "mean" else 1.0) / given, batch))

    def _judged(self, criterion: OutputModel, args: tuple[Tensor, ...], loss: Tensor) -> None:
        """After the criterion: when the backward pass begins at its loss, collect."""
        if not (self.probe.active and loss.requires_grad):
            return
        loan = self.probe.loans.lend(args)

        def begin(gradient: Tensor) -> None:
            if loan.lent is None:
                return
            output, target = loan.lent
            terms = criterion.terms(output, target)
            if self._pass is None:
                weight = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                self._begin(Pass(torch.where(weight == 0, 0.0, terms / weight), terms))
            else:
                self._pass.terms, self._pass.losses = (
                    self._pass.terms + terms,
                    self._pass.losses + 1,
                )
            if self.metric != "outer-product":
                self._ask(criterion, output, target)

        loss.register_hook(begin)

    def _begin(self, new: Pass) -> None:
        self._pass = new
        if self.before_pass is not None:
            self.before_pass()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """The backward pass is over; if it came by here at all, it counts."""
        if self._pass is not None and self._pass.calls:
            self.passes += 1
            self.total = self.total + self._pass.samples()
        self._pass = None
        if self.exchange is not None:
            self.exchange.end_pass()

    def _record(self, record: Record) -> None:
        if self.exchange is None or not self.exchange.take(*record):
            self.records.append(record)

    def _deliver(self, seen: Seen, delta: Tensor) -> None:
        """The ordinary backward pass comes by: the outer product metric."""
        module, a, batch, call = seen
        if self.criterion is None:
            self._reached(batch)
        if self._pass is None:
            return  # a loss that is not the criterion's
        self._pass.calls.add(call)
        if self.due:
            share = max(1, round(self.fraction * a.shape[0])) if self.fraction < 1 else a.shape[0]
            more = self._pass.scale * (a.shape[0] / share) ** 0.5
            w = kernels.square(delta[:share], more)
            self._record(Record(module, a[:share], w))

    def _ask(self, criterion: OutputModel, output: Tensor, target: Tensor) -> None:
        """Backpropagate the metric's own vectors, to the pre-activations and no further."""
        uses = self.probe.uses
        if self.metric == "backpropagated":
            uses = backpropagated.reached(output, uses)
            weights = backpropagated.weights(criterion, output, target, uses) if uses else []
            self._keep(uses, weights)
        elif uses:
            self._keep(uses, self._asked(criterion, output, target, uses))

    def _asked(
        self, criterion: OutputModel, output: Tensor, target: Tensor, uses: list[Use]
    ) -> list[Tensor | None]:
        """The weights ``w``, summed over the metric's vectors; ``None`` for calls that ``output`` does not depend on."""
        edges = [use.edge for use in uses]
        sums: list[Tensor | None] = [None] * len(uses)
        vectors = cotangents(
            self.metric, criterion, output, target, self.samples, self._generator(output.device)
        )
        boost = self._boost(output)
        scale = 1.0 if boost is None else 1 / boost
        with unsharded(self.probe.model):
            for vector in vectors:
                vector = (vector if boost is None else vector * boost).to(output.dtype)
                deltas = torch.autograd.grad(
                    output, edges, vector, retain_graph=True, allow_unused=True
                )
                for i, delta in enumerate(deltas):
                    if delta is not None:
                        sums[i] = kernels.square(delta, scale, onto=sums[i])
        return sums

    def _boost(self, output: Tensor) -> Tensor | None:
        """In float16 the vectors travel as large as the gradient does, which a gradient scaler has made fit."""
        if output.dtype != torch.float16 or self._pass is None:
            return None
        scale = torch.as_tensor(self._pass.scale, dtype=torch.float32, device=output.device)
        return torch.where(scale > 0, 1 / scale, 1.0).clamp_min(1.0)

    def _keep(self, uses: list[Use], weights: list[Tensor] | list[Tensor | None]) -> None:
        """Make records of the calls that were reached; the others wait for a loss of their own."""
        assert self._pass is not None
        done = {use: w for use, w in zip(uses, weights) if w is not None}
        for use, w in done.items():
            self._record(Record(use.module, use.a, w))
        self._pass.calls.update(use.call for use in done)
        self.probe.uses = [use for use in self.probe.uses if use not in done]

    def _generator(self, device: torch.device) -> Generator:
        if self.generator is None:
            self.generator = Generator(device).manual_seed(self._seed())
        return self.generator

    def set_generator(self, place: Tensor, device: torch.device | str) -> None:
        """Go on drawing from where another generator was."""
        self._generator(torch.device(device)).set_state(place.cpu())

    def _seed(self) -> int:
        return self.seed if self.exchange is None else self.exchange.seed(self.seed, self.step)

    def next_step(self, step: int) -> None:
        """With other ranks, draws are a function of rank and step, so that any rank's checkpoint resumes all of them."""
        self.step = step
        if self.exchange is not None and self.generator is not None:
            self.generator.manual_seed(self._seed())

    def restart(self) -> None:
        """Drop the backward passes so far; forward passes may still be waiting for theirs."""
        if self.exchange is not None:
            self.exchange.clear()
        self.records, self.passes, self.total = [], 0, 0

    def clear(self) -> None:
        """Let go of the batch."""
        self.restart()
        self._pass = None
        self.probe.clear()

    def close(self) -> None:
        """Leave no hook behind."""
        self.clear()
        if self.exchange is not None:
            self.exchange.close()
        self.probe.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
