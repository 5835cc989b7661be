r"""From forward and backward passes to weighted activities: what the metric is made of.

A :class:`Collector` watches a model train and keeps, until the optimizer's step, a list of :class:`Record`: a layer,
its activity ``a`` and the weights ``w``, such that the sum of :math:`w (1, a)(1, a)^⊤` over all of them is the metric
of the minibatch. Which vectors were backpropagated to get ``w`` is all that the metrics differ in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.utils.hooks import RemovableHandle

from quasidiag import backpropagated, kernels
from quasidiag.asking import Asking, activations
from quasidiag.layers.composite import Call
from quasidiag.metrics import cotangents
from quasidiag.outputs import OutputModel
from quasidiag.probe import Deltas, Hook, Loan, Outside, Probe, Seen, Use, reaches
from quasidiag.sharding import unsharded
from quasidiag.sharing import Samples, reduced
from quasidiag.units import Units

if TYPE_CHECKING:
    from quasidiag.distributed import Exchange

#: By call: the layers (one, or those inside a composite), their activities and weights.
Found = dict[Use, list[tuple[nn.Module, Tensor, Any]]]
LossScale = float | Tensor | Callable[[], float | Tensor]


class Record(NamedTuple):
    """One call of a layer, as the metric sees it.

    The weights ``w`` are a tensor, or :class:`quasidiag.kernels.Squares` that stand for one. With ``sharing="exact"``
    it is all calls of a pass that feed a block, and ``w`` are the :class:`Samples`.
    """

    module: nn.Module
    a: Tensor
    w: Any


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
        sharing: one of ``sharing.SHARINGS``.
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
        sharing: str = "expand",
        before_pass: Callable[[], None] | None = None,
    ) -> None:
        self.criterion, self.metric, self.samples = criterion, metric, samples
        self.fraction, self.loss_reduction, self.loss_scale = fraction, loss_reduction, loss_scale
        self.seed, self.sharing, self.before_pass = seed, sharing, before_pass
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
        #: Of the backward pass under way, what has to wait for its end.
        self._calls: list[Call] = []
        #: Calls that this pass has asked for: one that two losses depend on counts once.
        self._heard: set[Loan] = set()
        self._units: Units | None = None
        self._handles: list[RemovableHandle] = []
        along = self._deliver if metric == "outer-product" else None
        reached = self._reached if criterion is None else None
        self.probe = Probe(model, along, reached, Hook(self._between_passes))
        if criterion is not None:
            Hook.sweep(criterion)
            self._handles.append(
                criterion.register_forward_hook(Hook(self._judged), with_kwargs=True)
            )

    def watch(self, units: Units) -> None:
        """Watch the layers of these units and no others, from the next forward pass on."""
        self._units = units
        self.probe.watch(units.watched, units.parts)

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

    def _judged(
        self, criterion: OutputModel, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Tensor
    ) -> None:
        """After the criterion: when the backward pass begins at its loss, collect."""
        if not (self.probe.active and loss.requires_grad):
            return
        self._between_passes()
        loan = self.probe.loans.lend(criterion.read(args, kwargs))

        def begin(gradient: Tensor) -> None:
            if loan.lent is None or not reaches(loan.lent[0], self.probe.model.parameters()):
                return
            output, target = loan.lent
            weight = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            terms = criterion.terms(output, target)
            if isinstance(terms, Tensor):  # one over a whole number would be float32
                terms = terms.to(weight.dtype)
            if self._pass is None and gradient.is_cpu:
                value = float(gradient)
                self._begin(Pass(terms / value if value else 0.0, terms))
            elif self._pass is None:
                self._begin(Pass(torch.where(weight == 0, 0.0, terms / weight), terms))
            else:
                self._pass.terms = self._pass.terms + terms
                self._pass.losses += 1
            if self.metric != "outer-product":
                with torch.autocast(output.device.type, enabled=False):
                    self._ask(criterion, output, target)

        loss.register_hook(Outside(begin))

    def _between_passes(self) -> None:
        """In a forward pass no backward pass is under way: one that is open has ended in an error."""
        if torch._C._current_graph_task_id() == -1:
            self._pass, self._calls = None, []

    def _begin(self, new: Pass) -> None:
        if self.before_pass is not None:
            self.before_pass()
        self._let_go()  # of earlier passes, whose gradients stay
        self._pass = new
        torch.autograd.Variable._execution_engine.queue_callback(Outside(self._end))

    def _end(self) -> None:
        """The backward pass is over; if it came by here at all, it counts."""
        self._sum_up()
        if self._pass is not None and self._pass.calls:
            self.passes += 1
            self.total = self.total + self._pass.samples()
        self._pass = None
        if self.exchange is not None:
            self._let_go()  # what it has taken is summed up, and need not be held any longer
            self.exchange.end_pass()

    def _let_go(self) -> None:
        for loan in self._heard:
            loan.lent = None
        self._heard = set()

    def _record(self, call: nn.Module, a: Tensor, w: Any) -> None:
        """File a call under every block that it feeds."""
        assert self._units is not None
        for key in self._units.keys.get(call, ()):
            self._file(Record(key, a, w))

    def _file(self, record: Record) -> None:
        if self.exchange is None or not self.exchange.take(*record):
            self.records.append(record)

    def _deliver(self, seen: Seen, deltas: Deltas) -> None:
        """The ordinary backward pass comes by: the outer product metric."""
        if self.criterion is None:
            self._reached(seen.batch)
        if self._pass is None:
            return  # a loss that is not the criterion's
        self._pass.calls.add(seen.call)
        if not self.due:
            return
        for whole in seen.calls(deltas):
            call, scale = self._share(seen, whole, self._pass.scale)
            if self.sharing == "exact":
                self._hold(call, scale)
                continue
            a, delta = self._brought(call)
            self._record(call.module, a, self._squared(delta, scale))

    def _share(self, seen: Seen, call: Call, scale: float | Tensor) -> tuple[Call, float | Tensor]:
        """The share of the samples that enters the metric, each counted for as many more.

        Of a table all: it costs next to nothing, and positions, looked up once for every sample, are not samples.
        """
        table = isinstance(call.module, nn.Embedding)
        if self.sharing == "expand" and (self.fraction == 1 or table):
            return call, scale
        self._check_batch(seen, call)
        samples = len(call.a)
        share = max(1, round(self.fraction * samples)) if self.fraction < 1 else samples
        if share == samples:
            return call, scale
        call = Call(call.module, call.a[:share], call.delta[:share])
        return call, scale * (samples / share) ** 0.5

    def _brought(self, call: Call) -> tuple[Tensor, Tensor]:
        """Activity and derivative as the way of sharing has them."""
        return (call.a, call.delta) if self.sharing == "expand" else reduced(*call)

    def _squared(self, delta: Tensor, scale: float | Tensor) -> Any:
        """The weights that one vector gives. Other ranks need them as numbers."""
        square = kernels.squares if self.exchange is None else kernels.square
        return square(delta, scale)

    def _hold(self, call: Call, scale: float | Tensor) -> None:
        delta = call.delta.to(torch.promote_types(call.delta.dtype, torch.float32))
        self._calls.append(call._replace(delta=delta * scale))

    def _check_batch(self, seen: Seen, call: Call) -> None:
        """Where single samples matter they must be found: along the first dimension, as in the model's input."""
        apart = self.sharing != "expand"
        if (apart and len(call.a) != seen.batch) or (
            self.fraction < 1 and len(call.a) % seen.batch
        ):
            what = f"sharing={self.sharing!r}" if apart else f"metric_fraction={self.fraction}"
            raise ValueError(
                f"{what} needs the samples apart, and a {type(seen.module).__name__} was given {len(call.a)} along its "
                f"first dimension where the model was given {seen.batch}: keep the batch dimension first throughout, or "
                f"use {'sharing=' + repr('expand') if apart else 'metric_fraction=1.0'}"
            )

    def _sum_up(self) -> None:
        """With ``sharing="exact"``, the calls of one vector make up the gradients of the samples."""
        if not self._calls:
            return
        assert self._units is not None
        groups: dict[nn.Module, list[Call]] = {}
        for call in self._calls:
            for key in self._units.keys.get(call.module, ()):
                groups.setdefault(key, []).append(call)
        for key, calls in groups.items():
            self._file(Record(key, calls[0].a, Samples(calls)))
        self._calls = []

    def _ask(self, criterion: OutputModel, output: Tensor, target: Tensor) -> None:
        """Backpropagate the metric's own vectors, to the pre-activations and no further."""
        uses = self.probe.uses(output, self._heard)
        if not uses:
            return  # somebody else's output
        if self.metric == "backpropagated":
            weights = backpropagated.weights(criterion, output, target, uses)
            found = {use: [(use.module, use.a, w)] for use, w in zip(uses, weights)}
        else:
            found = self._asked(criterion, output, target, uses)
        self._keep(found)

    def _asked(
        self, criterion: OutputModel, output: Tensor, target: Tensor, uses: list[Use]
    ) -> Found:
        """What each call that ``output`` depends on gives, summed over the metric's vectors."""
        found: dict[Use, dict[nn.Module, tuple[Tensor, Any]]] = {}
        boost = self._boost(output)
        scale = 1.0 if boost is None else 1 / boost
        once = self.metric == "monte-carlo" and self.samples == 1
        many = self.metric == "exact" and self.sharing == "expand" and boost is None
        above = activations(output, uses) if many else {}
        ones: dict[Use, Deltas] = {}

        def take(use: Use, deltas: Deltas) -> None:
            sums = found.setdefault(use, {})
            if use in above:  # what its slope will be asked with
                ones[use] = [d if d is None else d.new_ones(()).expand_as(d) for d in deltas]
            for whole in use.calls(deltas):
                call, by = self._share(use.seen, whole, scale)
                if self.sharing == "exact":
                    self._hold(call, by)
                    continue
                a, delta = self._brought(call)
                a, before = sums.get(call.module, (a, None))
                first = before is None and once
                w = self._squared(delta, by) if first else kernels.square(delta, by, onto=before)
                sums[call.module] = a, w

        vectors = cotangents(
            self.metric, criterion, output, target, self.samples, self._generator(output.device)
        )
        with unsharded(self.probe.model), Asking(output, uses, take, above) as asking:
            for vector in vectors:
                asking.backpropagate((vector if boost is None else vector * boost).to(output.dtype))
                self._sum_up()
        for use, node in above.items():
            slope: Any = node
            for call in use.calls([slope(*ones[use])]) if use in ones else ():
                _, w = found[use][call.module]
                kernels.weaken_(w, call.delta[: len(w)])
        return {use: [(m, *aw) for m, aw in sums.items()] for use, sums in found.items()}

    def _boost(self, output: Tensor) -> Tensor | None:
        """In float16 the vectors travel as large as the gradient does, which a gradient scaler has made fit."""
        if output.dtype != torch.float16 or self._pass is None:
            return None
        scale = torch.as_tensor(self._pass.scale, dtype=torch.float32, device=output.device)
        return torch.where(scale > 0, 1 / scale, 1.0).clamp_min(1.0)

    def _keep(self, found: Found) -> None:
        """Make records of the calls that were reached; the others wait for a loss of their own."""
        assert self._pass is not None
        for use, given in found.items():
            self._pass.calls.add(use.call)
            for module, a, w in given:
                self._record(module, a, w)
        self._heard |= {use.loan for use in found}

    def _generator(self, device: torch.device) -> Generator:
        if self.generator is None:
            self.generator = Generator(device).manual_seed(self._seed())
        return self.generator

    def set_generator(self, place: Tensor, device: torch.device | str) -> None:
        """Go on drawing from where another generator was; with other ranks, rank and step say where that is."""
        if self.exchange is None:
            self._generator(torch.device(device)).set_state(place.cpu())

    def _seed(self) -> int:
        return self.seed if self.exchange is None else self.exchange.seed(self.seed, self.step)

    def next_step(self, step: int) -> None:
        """With other ranks, draws are a function of rank and step: any rank's checkpoint resumes all of them."""
        self.step = step
        if self.exchange is not None and self.generator is not None:
            self.generator.manual_seed(self._seed())

    def restart(self) -> None:
        """Drop the backward passes so far; forward passes may still be waiting for theirs."""
        if self.exchange is not None:
            self.exchange.clear()
        self.records, self.passes, self.total = [], 0, 0
        self._calls, self._heard = [], set()

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
