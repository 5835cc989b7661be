"""Keeps the minibatches of a model until the optimizer's step, to see how outputs and losses change when parameters do.

For that the model is run again (:mod:`quasidiag.auto.rerun`), on a share of each minibatch (:mod:`quasidiag.auto.division`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quasidiag.auto.calls import Batch, Call, Piece, changed, versions
from quasidiag.auto.directions import Direction
from quasidiag.auto.division import Division
from quasidiag.auto.fingerprint import fingerprint
from quasidiag.auto.report import Report
from quasidiag.auto.rerun import Moved, Rerun
from quasidiag.auto.standing_in import doubled, standing_in
from quasidiag.auto.witness import Witness
from quasidiag.layers.composite import Surroundings
from quasidiag.outputs import OutputModel
from quasidiag.probe import Hook, Loan, Loans, Outside, below, leaf, reaches, tensors
from quasidiag.strata import Part

#: On a CPU so many numbers of the outputs are converted to float64 at a time: new memory costs more than arithmetic.
AT_ONCE = 2**16
#: In one of so many forward passes it is checked whether the model draws from generators that are not torch's: reading
#: their states takes longer than all else here. The number is prime, so that calls that repeat in a cycle are all checked
#: sooner or later. So is the pass after a retreat. Once a model was seen to draw from them, their states are recorded in
#: every pass.
LOOK = 47
#: A negative total of weights is taken for zero if it is less than this, relative to the sum of their absolute values.
ROUNDING = 1e-6


class Replay:
    """Remembers the calls of ``model`` in training mode, and the calls of ``criterion`` on their outputs.

    Only minibatches that are part of the current gradients of ``parameters`` count: a backward pass that finds every
    ``.grad`` to be ``None`` (not zeros) starts anew. A minibatch that was not backpropagated is held by its graph alone,
    and is freed with it. ``report`` keeps what was found about its samples.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: OutputModel,
        parameters: Sequence[Tensor],
        report: Report | None = None,
    ) -> None:
        self.model, self.criterion, self.parameters = model, criterion, parameters
        self.rerun = Rerun(model)
        self.division = Division(self.rerun, criterion, report or Report())
        self._calls, self._judgements = Loans(), Loans()
        #: The last call, kept alive here because its outputs may have no graph to hold it.
        self._last: Loan | None = None
        self._around: tuple[Surroundings, list[int]] | None = None
        #: Whether the model was ever seen to draw from a generator that is not torch's; the number of its passes so far.
        self._foreign, self._passes = False, 0
        self._used: list[Batch] = []
        self._pass, self._witness = -1, Witness()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(Hook(self._entered), with_kwargs=True),
            model.register_forward_hook(Hook(self._left), with_kwargs=True),
            criterion.register_forward_hook(Hook(self._judged), with_kwargs=True),
        ]

    def clear(self) -> None:
        """Let go of the batches."""
        self._calls.call_back()
        self._judgements.call_back()
        self._around, self._last, self._used = None, None, []

    def look_again(self) -> None:
        """Look at the generators in the next pass: a step did harm, perhaps because a replay drew other numbers."""
        self._passes = 0

    def restart(self) -> None:
        """Forget which minibatches were backpropagated; those of forward passes without a backward pass yet are kept."""
        for batch in self._used:
            batch.weight = None
        self._used = []

    def close(self) -> None:
        """Leave no hook behind."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entered(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            foreign = self._foreign or self._passes % LOOK == 0
            self._passes += 1
            device = next(model.parameters()).device  # the optimizer may have none yet
            self._around = Surroundings(device, True, foreign), versions((args, kwargs))

    def _left(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        around, self._around = self._around, None
        if around is not None:
            found = tensors(output)
            outputs = [x.detach() for x in found]
            surroundings, entered = around
            self._foreign = surroundings.drew() or self._foreign
            given = changed((args, kwargs), Tensor.detach)
            call = Call(given, surroundings, outputs, versions(outputs), entered)
            self._last = self._calls.lend(call)
            for x in found:
                if x.grad_fn is not None:
                    self._calls.leave(x.grad_fn, self._last)

    def _judged(self, criterion: OutputModel, args: Any, kwargs: Any, loss: Tensor) -> None:
        if not (loss.requires_grad and self.model.training):
            return  # a loss that is evaluated, or computed anew
        calls: list[Call] = [loan.lent for loan in self._calls]
        if not calls:
            return
        judged, target = criterion.read(args, kwargs)
        output, target = judged.detach(), target.detach()
        found = ((call, call.reading(output)) for call in reversed(calls))
        unknown = calls[-1], None
        call, reading = next((pair for pair in found if pair[1] is not None), unknown)
        if reading is None and not self._concerns(judged):
            return  # another model's output
        if reading is not None and reading.strides is None:
            # A copy may be written to before the step, and a cast's rounding is not what a replay gives.
            output = reading.of(call.outputs)
        batch = Batch(call, reading, output, target, versions(target), loss.detach().clone())
        loan = self._judgements.lend((batch, judged))

        def backpropagated(gradient: Tensor) -> None:
            if loan.lent is not None and reaches(loan.lent[1], self.parameters):
                self._begin()
                self._count(loan.lent[0], gradient.detach())

        loss.register_hook(Outside(backpropagated))

    def _count(self, batch: Batch, weight: Tensor) -> None:
        """Note that a minibatch was backpropagated with this weight, on top of what it had."""
        if batch not in self._used:
            self._used.append(batch)
        batch.weight = weight if batch.weight is None else batch.weight + weight

    def _begin(self) -> None:
        """At the first loss of a backward pass: if no parameter has a gradient, forget earlier backward passes.

        The witness looks at the gradients when it ends.
        """
        now = torch._C._current_graph_task_id()
        if now != self._pass:
            self._pass = now
            if not [p for p in self.parameters if p.grad is not None]:
                self.restart()
            _at_the_end(lambda: _at_the_end(self._saw))

    def _saw(self) -> None:
        """Show the witness the gradients at the end of a backward pass."""
        weights = (batch.weight for batch in self._used if batch.weight is not None)
        self._witness.see(self.parameters, weights)

    def _concerns(self, output: Tensor) -> bool:
        """Whether an output depends on a parameter of the model."""
        own = {id(p) for p in self.model.parameters()}
        return any(id(leaf(node)) in own for node in below(output))

    def check(self) -> None:
        """Before a step: raise unless there are minibatches and they can be replayed."""
        self._witness.look_again()
        if not self._used:
            raise RuntimeError(
                "step='auto' saw no loss: compute it with the criterion that the optimizer was given, on the output of "
                "a forward pass in training mode, outside of the model's forward; and call the model itself, model(x), "
                "not model.forward(x) or its layers one by one"
            )
        if any(batch.reading is None for batch in self._used):
            raise RuntimeError(
                "step='auto' could not find the criterion's output among what the model returned (tensors, also in tuples, "
                "lists, dictionaries and dataclasses): call the criterion on the model's output itself, a slice or another "
                "view of it (logits[:, :-1] as it is, where sequences are shifted), or give an lr"
            )
        if not all(batch.intact for batch in self._used):
            raise RuntimeError(
                "step='auto' runs the model on the minibatch again, and its input, output or target was changed in "
                "place since the forward pass (or by it): write into them after the step, or give the model a copy"
            )
        weights = [float(batch.weight) for batch in self._used if batch.weight is not None]
        total = sum(weights)
        if total < -ROUNDING * sum(map(abs, weights)):
            raise ValueError(
                f"step='auto' minimises a loss, and the criterion's, {type(self.criterion).__name__}, enters what was "
                f"backpropagated with a weight of {total:g}: leave the minus out, or give an lr"
            )

    def weighted(self) -> list[tuple[float, Batch]]:
        """The minibatches of this step, each with its weight in the loss, without a gradient scaler's factor."""
        used = self._used
        weights = [float(batch.weight) for batch in used if batch.weight is not None]
        largest: dict[Call, float] = {}
        for batch, weight in zip(used, weights):
            largest[batch.call] = max(largest.get(batch.call, 0.0), weight)
        scale = self._witness.scale(sum(largest.values()))
        return [(weight / scale, batch) for batch, weight in zip(used, weights)]

    def tangents(self, batch: Batch, directions: Sequence[Direction], share: float) -> Moved:
        """The outputs on a share of a minibatch, their targets, and their derivative along each direction."""
        part = self.part(batch, share)
        while True:
            try:
                return self.rerun.tangents(batch, directions, part)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:
                if part is not None and self.rerun.tried(batch, part) is None:
                    self.division.divisible, part = False, None
                elif not self.rerun.slower():
                    raise

    def part(self, batch: Batch, share: float) -> Part | None:
        """The samples that make up a share, or ``None`` where the model needs all of them."""
        return self.division.part(batch, share)

    def terms(self, batch: Batch, share: float = 1.0) -> int:
        """How many terms the loss of a share of a minibatch is the mean of."""
        part = self.part(batch, share) if share < 1 else None
        if part is None:
            return self.division.terms(batch)
        if part not in batch.counts:
            # Only the number of rows and the targets matter here, so any rows of the output do, without a copy.
            output = batch.output[: len(batch.output) // part.samples * part.kept]
            terms = self.criterion.terms(output, part.rows(batch.target))
            batch.counts[part] = int(terms)
        return batch.counts[part]

    def values(self, batch: Batch, start: Direction, share: float = 1.0) -> tuple[Tensor, Tensor]:
        """The loss of a share of a minibatch as it was, and with the parameters ``start`` in the place of the model's.

        In float64 from the outputs on: the constants in a loss would, in float32, hide what a small step does. Where
        dropout masks or batch statistics of a part of the samples are not those of all, both losses are computed anew.
        """
        part = self.part(batch, share)
        if part is not None:
            now, output = self._now(batch, part), self.rerun.tried(batch, part, start)
            if now is not None and output is not None:
                return now, self._loss(output, batch, part, start)
            self.division.divisible = False
        now = self._now(batch, None)
        assert now is not None
        return now, self._loss(self.rerun.run(batch, start), batch, None, start)

    def _now(self, batch: Batch, part: Part | None) -> Tensor | None:
        """The loss of a part as it was, computed once and then kept; ``None`` if the model does not run on that part."""
        if part not in batch.values:
            output = batch.output if part is None else self._before(batch, part)
            if output is None:
                return None
            batch.values[part] = self._loss(output, batch, part, {})
        return batch.values[part]

    def _before(self, batch: Batch, part: Part) -> Tensor | None:
        """The output for a part of the samples as it was; ``None`` if the model does not run on that part.

        In half precision it is computed anew even where samples do not depend on each other: it depends on how many there
        are, by rounding, and a small step changes no more than that.
        """
        full = batch.output.dtype.itemsize >= 4 and not batch.call.around.autocast
        known = self.division.apart and full
        return part.rows(batch.output) if known else self.rerun.tried(batch, part)

    def _loss(
        self, output: Tensor, batch: Batch, part: Part | None, parameters: Direction
    ) -> Tensor:
        """The criterion's mean over all samples, by those of a part, with ``parameters`` in the place of its own.

        In float64, and in pieces: the strata of the part, and on a CPU so many numbers at a time.
        """
        own: dict[Tensor, Tensor] = {
            p: parameters.get(p, p).detach().double() for p in self.criterion.parameters()
        }

        def loss(y: Tensor, t: Tensor) -> Tensor:
            return self.criterion(y.double(), t.double() if t.is_floating_point() else t)

        with torch.no_grad(), standing_in(self.criterion, own, doubled):
            pieces = self._pieces(batch, part, output)
            if len(pieces) == 1:
                return loss(output, pieces[0].target)
            rows = output if part is None else part.sorted(output)
            each = zip(rows.split([piece.rows for piece in pieces]), pieces)
            found = [loss(y, piece.target) * piece.terms for y, piece in each if piece.terms]
            if not found:
                return loss(output, batch.targets(part))
            return torch.stack(found).sum() / sum(piece.terms for piece in pieces)

    def _pieces(self, batch: Batch, part: Part | None, output: Tensor) -> list[Piece]:
        """The pieces that the loss of a part is computed in, the same for every ``output``."""
        if part not in batch.pieces:
            target = batch.targets(part)
            both = [(1.0, output, target)]
            if part is not None:
                split = zip(part.split(output), part.split(target))
                both = [(each, y, t) for (each, y), (_, t) in split]
            pieces = [(each, y, t) for each, ys, ts in both for y, t in _in_pieces(ys, ts)]
            batch.pieces[part] = [
                Piece(len(y), t, each * float(self.criterion.terms(y, t)) if pieces[1:] else 1.0)
                for each, y, t in pieces
            ]
        return batch.pieces[part]

    def loss(self) -> float:
        """The loss of this step: the sum over its minibatches, each with its weight."""
        return sum(weight * float(batch.loss) for weight, batch in self.weighted())

    def least(self, batch: Batch) -> float:
        """The least value that the loss of a minibatch can have, constants included."""
        return self.criterion.least_of(batch.output)

    def above_least(self) -> float:
        """How far the loss of this step is above the least value that it could have; infinite if ``criterion.least`` is."""
        if not math.isfinite(self.criterion.least):
            return math.inf
        return sum(weight * self._room(batch) for weight, batch in self.weighted())

    def _room(self, batch: Batch) -> float:
        """How far the loss of a minibatch is above its least value; next to a constant, in float64."""
        least = self.least(batch)
        if least == self.criterion.least:
            return float(batch.loss) - least
        now = self._now(batch, None)
        assert now is not None
        return float(now) - least

    def samples(self) -> int:
        """How many samples the minibatches of this step have."""
        return sum(len(batch.target) for batch in self._used)

    @property
    def void(self) -> bool:
        """Whether there are losses, none of which has a term: they are nan then, and terms are only counted then."""
        losses = [batch.loss for batch in self._used]
        return bool(losses) and all(math.isnan(x) for x in losses) and not self.size()

    def size(self) -> int:
        """The number of terms in the losses of this step; of several losses on one call, the one with the most counts."""
        most: dict[Call, int] = {}
        for batch in self._used:
            most[batch.call] = max(most.get(batch.call, 0), self.terms(batch))
        return sum(most.values())

    def classes(self) -> int:
        """The number of classes that the targets of this step are chosen from; 1 if there are no classes."""
        return max((self.criterion.classes(batch.output) for batch in self._used), default=1)

    def fingerprint(self) -> float:
        """A number for the data of this step (:mod:`quasidiag.auto.fingerprint`)."""
        return fingerprint((b.target, [*tensors(b.call.arguments)]) for b in self._used)


def _in_pieces(output: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """On a CPU, so many rows of a large output at a time."""
    rows = AT_ONCE // max(1, output[0].numel())
    if output.is_cuda or not 0 < rows < len(output) == len(target):
        return [(output, target)]
    return [*zip(output.split(rows), target.split(rows))]


def _at_the_end(call: Callable[[], None]) -> None:
    """Queue a call for the end of the current backward pass; queued from such a call, it comes after DDP's averaging."""
    torch.autograd.Variable._execution_engine.queue_callback(Outside(call))
