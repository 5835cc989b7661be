r"""Collects the weighted activities that the metric is made of, during forward and backward passes.

A :class:`Collector` watches a model train and keeps, until the optimizer's step, a list of :class:`Record`: a layer,
its activity ``a`` and the weights ``w``, such that the sum of :math:`w (1, a)(1, a)^⊤` over all records is the metric
of the minibatch. The metrics differ only in the vectors that are backpropagated to get ``w``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from quasidiag import backpropagated, kernels
from quasidiag.asking import Asking, activations
from quasidiag.layers.composite import Call
from quasidiag.metrics import cotangents
from quasidiag.outputs import OutputModel
from quasidiag.probe import Deltas, Hook, Loan, Outside, Probe, Seen, Use, reaches
from quasidiag.sharding import unsharded
from quasidiag.sharing import Samples, reduced
from quasidiag.strata import FEW, Part, Strata
from quasidiag.units import Units

if TYPE_CHECKING:
    from quasidiag.distributed import Exchange

#: For each call: the layer (or the dense layers inside a composite one) with its activity and weights.
Found = dict[Use, list[tuple[nn.Module, Tensor, Any]]]
LossScale = float | Tensor | Callable[[], float | Tensor]
#: Sharings that count positions where they do not say otherwise, so that samples need not be told apart.
POSITIONS = ("expand", "recurrent")


class Record(NamedTuple):
    """One call of a layer: its activity ``a`` and the weights ``w``, a tensor or :class:`quasidiag.kernels.Squares`.

    Of the gradients of single samples (``sharing="exact"``) one record holds all calls in a pass that feed a block, as the
    :class:`Samples` ``w``.
    """

    module: nn.Module
    a: Tensor
    w: Any


@dataclass
class Pass:
    """A backward pass in progress. Its gradient is ``1/scale`` times that of the sum of the samples' losses."""

    scale: float | Tensor
    terms: int | Tensor
    losses: int = 1
    calls: set[int] = field(default_factory=set)

    def samples(self) -> int | float | Tensor:
        """The number of samples in the pass. Several losses on one call of the model share the same samples."""
        extra = self.losses / max(1, min(self.losses, len(self.calls)))
        return self.terms if extra == 1 else self.terms / extra


class Collector:
    """Watches ``model`` and ``criterion`` and keeps the records of the minibatch.

    Args:
        model: the model that is trained.
        criterion: the output model, or ``None`` for the outer product metric of any loss.
        metric: one of ``metrics.METRICS``.
        samples: draws per sample, for the Monte Carlo metric.
        fraction: the share of each minibatch that enters the metric; ``None`` for as many samples as matter
            (:mod:`quasidiag.strata`), which single draws tell, and else for all.
        loss_reduction: without a criterion, whether the loss is a ``"mean"`` or a ``"sum"`` over the batch.
        loss_scale: without a criterion, the factor that the loss is multiplied by before its backward pass.
        seed: the seed of the generator that draws the Monte Carlo targets.
        sharing: one of ``sharing.SHARINGS``.
        before_pass: called when a backward pass begins, before it leaves any record.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: OutputModel | None,
        metric: str,
        samples: int = 1,
        fraction: float | None = 1.0,
        loss_reduction: str = "mean",
        loss_scale: LossScale = 1.0,
        seed: int = 0,
        sharing: str = "expand",
        before_pass: Callable[[], None] | None = None,
    ) -> None:
        self.criterion, self.metric, self.samples = criterion, metric, samples
        self.fraction = 1.0 if fraction is None else fraction
        self.loss_reduction, self.loss_scale = loss_reduction, loss_scale
        #: Whether samples are chosen by how much they matter.
        single = metric == "monte-carlo" and samples == 1
        self.chooses = fraction is None and single and sharing in POSITIONS
        self.seed, self.sharing, self.before_pass = seed, sharing, before_pass
        self.generator: Generator | None = None
        #: The records of the last backward pass; those of earlier ones since the step are in :mod:`quasidiag.sums`.
        self.records: list[Record] = []
        #: The exchange with other ranks, if any; it takes records as they are made (:mod:`quasidiag.distributed`).
        self.exchange: Exchange | None = None
        self.step = 0
        #: Whether this step's minibatch enters the metric.
        self.due = True
        #: Backward passes since the last step, and the samples in them.
        self.passes = 0
        self.total: int | float | Tensor = 0
        self._pass: Pass | None = None
        #: For gradients of single samples, calls that wait until all calls of their backward pass are there.
        self._calls: list[Call] = []
        #: Calls that this pass has already used: a call that two losses depend on counts once.
        self._heard: set[Loan] = set()
        #: The layers that were looked at, and whether each (or part of one) was given the samples, in their order.
        self._known: set[nn.Module] = set()
        self._given: dict[nn.Module, bool] = {}
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
        self._known, self._given = set(), {}
        self.probe.watch(units.watched, units.parts)

    def schedule(self, due: bool) -> None:
        """Set whether the next step's minibatch enters the metric. For a summed loss samples are counted either way."""
        self.due = due
        self.probe.enabled = due or (self.criterion is None and self.loss_reduction == "sum")

    def factor(self) -> float | Tensor:
        """The factor that turns the sum over the records into a mean over samples; 0 if there are none."""
        if not self.passes:
            return 0.0
        return (self.passes**2 if self.divided else 1) / self.total

    @property
    def divided(self) -> bool:
        """Whether the loss of each of *k* accumulated passes is assumed to be divided by *k*, as a mean loss usually is.

        A criterion's loss is not: its backward pass shows what it was multiplied by.
        """
        return self.criterion is None and self.loss_reduction == "mean"

    def _reached(self, batch: int) -> None:
        """Begin a pass when the backward pass of a loss without criterion reaches the model's output."""
        if self._pass is None:
            given = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
            self._begin(Pass((batch if self.loss_reduction == "mean" else 1.0) / given, batch))

    def _judged(
        self, criterion: OutputModel, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Tensor
    ) -> None:
        """After the criterion was called: collect as soon as a backward pass begins at its loss."""
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
            if isinstance(terms, Tensor):  # one over an integer tensor would be float32
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
        """At a forward pass, drop a pass that is still open: its backward pass ended in an error."""
        if torch._C._current_graph_task_id() == -1:
            self._pass, self._calls = None, []

    def _begin(self, new: Pass) -> None:
        if self.before_pass is not None:
            self.before_pass()
        self._let_go()  # of the calls of earlier passes; their gradients stay
        self._pass = new
        torch.autograd.Variable._execution_engine.queue_callback(Outside(self._end))

    def _end(self) -> None:
        """At the end of a backward pass: count it if it went through a watched layer."""
        self._sum_up()
        if self._pass is not None and self._pass.calls:
            self.passes += 1
            self.total = self.total + self._pass.samples()
        self._pass = None
        if self.exchange is not None:
            self._let_go()  # what the exchange took is summed up, and need not be held any longer
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
        """For the outer product metric: make records when the ordinary backward pass reaches a layer."""
        if self.criterion is None:
            self._reached(seen.batch)
        if self._pass is None:
            return  # a loss that is not the criterion's
        self._pass.calls.add(seen.call)
        if not self.due:
            return
        for whole in seen.calls(deltas):
            call, scale = self._share(seen, whole, self._pass.scale)
            if self._summed(call.module):
                self._hold(call, scale)
                continue
            a, delta = self._brought(call)
            self._record(call.module, a, self._squared(delta, scale))

    def _share(self, seen: Seen, call: Call, scale: float | Tensor) -> tuple[Call, float | Tensor]:
        """The share of the samples that enters the metric, with a scale that makes up for the others.

        Lookup tables use all: that costs next to nothing, and positions, looked up once for all samples, are no samples.
        """
        table = isinstance(call.module, nn.Embedding)
        if self.sharing in POSITIONS and (self.fraction == 1 or table):
            return call, scale
        self._check_batch(seen, call)
        samples = len(call.a)
        share = max(1, round(self.fraction * samples)) if self.fraction < 1 else samples
        if share == samples:
            return call, scale
        call = Call(call.module, call.a[:share], call.delta[:share])
        return call, scale * (samples / share) ** 0.5

    def _summed(self, module: nn.Module) -> bool:
        """Whether gradients of single samples are kept of a layer (or part)."""
        assert self._units is not None
        return self._units.summed(module)

    def _brought(self, call: Call) -> tuple[Tensor, Tensor]:
        """Activity and derivative; with ``sharing="reduce"`` those of one position per sample."""
        return reduced(*call) if self.sharing == "reduce" else (call.a, call.delta)

    def _squared(self, delta: Tensor, scale: float | Tensor) -> Any:
        """The weights ``(scale·delta)²`` of one vector. To be exchanged with other ranks they must be a tensor."""
        square = kernels.squares if self.exchange is None else kernels.square
        return square(delta, scale)

    def _hold(self, call: Call, scale: float | Tensor) -> None:
        delta = call.delta.to(torch.promote_types(call.delta.dtype, torch.float32))
        self._calls.append(call._replace(delta=delta * scale))

    def _check_batch(self, seen: Seen, call: Call) -> None:
        """Raise if single samples are needed but do not lie along the first dimension, as in the model's input."""
        apart = self.sharing not in POSITIONS
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
        """Make one record from all calls of one vector, for each block that takes gradients of single samples.

        With ``sharing="recurrent"``, calls on equally many sequences are taken for calls on the same ones (a cell in a
        loop), others for calls on others.
        """
        if not self._calls:
            return
        assert self._units is not None
        groups: dict[tuple[nn.Module, int], list[Call]] = {}
        for call in self._calls:
            size = len(call.a) if self.sharing == "recurrent" else 0
            for key in self._units.keys.get(call.module, ()):
                groups.setdefault((key, size), []).append(call)
        for (key, _), calls in groups.items():
            self._file(Record(key, calls[0].a, Samples(calls)))
        self._calls = []

    def _ask(self, criterion: OutputModel, output: Tensor, target: Tensor) -> None:
        """Backpropagate the metric's own vectors, to the pre-activations and no further."""
        uses = self.probe.uses(output, self._heard)
        if not uses:
            return  # another model's output
        if self.metric == "backpropagated":
            weights = backpropagated.weights(criterion, output, target, uses)
            found = {use: [(use.module, use.a, w)] for use, w in zip(uses, weights)}
        else:
            found = self._asked(criterion, output, target, uses)
        self._keep(found)

    def _asked(
        self, criterion: OutputModel, output: Tensor, target: Tensor, uses: list[Use]
    ) -> Found:
        """Activity and weights of each call that ``output`` depends on, summed over the metric's vectors."""
        found: dict[Use, dict[nn.Module, tuple[Tensor, Any]]] = {}
        boost = self._boost(output)
        scale = 1.0 if boost is None else 1 / boost
        once = self.metric == "monte-carlo" and self.samples == 1
        many = self.metric == "exact" and self.sharing in POSITIONS and boost is None
        above = activations(output, uses) if many else {}
        ones: dict[Use, list[Tensor]] = {}

        part: Part | None = None

        def take(use: Use, deltas: Deltas) -> None:
            sums = found.setdefault(use, {})
            if use in above:  # the input to its activation's node, which then returns the slope
                ones[use] = [d.new_ones(()).expand_as(d) for d in deltas if d is not None]
            for whole in use.calls(deltas):
                call, by = self._share(use.seen, self._some(whole, part), scale)
                if self._summed(call.module):
                    self._hold(call, by)
                    continue
                a, delta = self._brought(call)
                a, before = sums.get(call.module, (a, None))
                first = before is None and once
                if before is None and not once and delta.dtype.itemsize < 4:
                    before = torch.zeros_like(delta, dtype=torch.float32)  # for a sum of many
                w = self._squared(delta, by) if first else kernels.square(delta, by, onto=before)
                sums[call.module] = a, w

        generator = self._generator(output.device)
        vectors = cotangents(self.metric, criterion, output, target, self.samples, generator, boost)
        with unsharded(self.probe.model), Asking(output, uses, take, above) as asking:
            for vector in vectors:
                part = self._chosen(vector, uses[0].seen.batch)
                if part is not None:
                    self._find_samples(output, uses, vector, part)
                asking.backpropagate(vector)
                self._sum_up()
        for use, node in above.items():
            for one in ones.get(use, ()):
                slope = backpropagated.slope(GradientEdge(node, 0), use.edge, one, one.shape)
                assert slope is not None
                for call in use.calls([slope]):
                    _, w = found[use][call.module]
                    kernels.weaken_(w, call.delta[: len(w)])
        return {use: [(m, *aw) for m, aw in sums.items()] for use, sums in found.items()}

    def _chosen(self, vector: Tensor, samples: int) -> Part | None:
        """The samples that enter the metric, by how much each matters; ``None`` for all."""
        if not self.chooses or samples < 2 * FEW or len(vector) % samples:
            return None
        strata = Strata(vector.reshape(samples, -1))
        return None if strata.enough == samples else strata.part(strata.enough)

    def _find_samples(self, output: Tensor, uses: list[Use], vector: Tensor, part: Part) -> None:
        """Which new layers were given the samples: those whose derivatives are zero where the output's are made so.

        Not, say, as many prototypes, nor the samples in another order. A layer that has no derivatives at all does not
        tell: it is asked again.
        """
        fresh = [use for use in uses if use.module not in self._known]

        def look(use: Use, deltas: Deltas) -> None:
            for call in use.calls(deltas):
                if call.delta.any():
                    same = len(call.a) == part.samples and part.holds(call.delta)
                    self._given[call.module] = self._given.get(call.module, True) and same
                    self._known.add(use.module)

        if fresh:
            with Asking(output, fresh, look, {}) as asking:
                asking.backpropagate(part.alone(vector))

    def _some(self, call: Call, part: Part | None) -> Call:
        """The part of a call's samples that stands for all of them.

        Lookup tables use all samples, and so do layers that were not given one row for each.
        """
        table = isinstance(call.module, nn.Embedding)
        if part is None or table or not self._given.get(call.module) or len(call.a) != part.samples:
            return call
        delta = part.rows(call.delta)
        return Call(call.module, part.rows(call.a), delta * part.weights(delta).sqrt())

    def _boost(self, output: Tensor) -> Tensor | None:
        """A factor that makes vectors in float16 as large as the gradient, which a gradient scaler keeps in range."""
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
        """Continue from the generator state ``place``; not with other ranks, where rank and step determine the draws."""
        generator = self._generator(torch.device(device))
        # Those of a CPU and of a GPU differ, and have different sizes: there the draws start anew from the seed.
        if self.exchange is None and len(place) == len(generator.get_state()):
            generator.set_state(place.cpu())

    def _seed(self) -> int:
        return self.seed if self.exchange is None else self.exchange.seed(self.seed, self.step)

    def next_step(self, step: int) -> None:
        """Begin a step. With other ranks, draws depend on rank and step alone: any rank's checkpoint resumes them all."""
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
        """Drop all references to the batch."""
        self.restart()
        self._pass = None
        self.probe.clear()

    def close(self) -> None:
        """Remove all hooks."""
        self.clear()
        if self.exchange is not None:
            self.exchange.close()
        self.probe.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
