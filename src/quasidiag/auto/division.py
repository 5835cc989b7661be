"""Which samples of a minibatch are run again.

All; or, where the model can be run on a part of them, some at even distances, or some that stand for all by how much they
matter (:mod:`quasidiag.strata`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quasidiag.auto.calls import Batch
from quasidiag.auto.report import Report
from quasidiag.auto.rerun import Rerun
from quasidiag.outputs import OutputModel
from quasidiag.strata import FEW, Part, Strata

#: How much samples matter is not asked where there is more than this of a thing: numbers in the output, of which it takes a
#: second copy, and terms of the loss in each sample (positions of a sequence), of which a few samples have enough.
LARGE, LONG = 2**24, 32


class Division:
    """Divides minibatches, where the model can be run on a part of the samples.

    What was found out about that is kept in ``report``, so that training that is resumed goes on as it would have.
    """

    def __init__(self, rerun: Rerun, criterion: OutputModel, report: Report) -> None:
        self.rerun, self.criterion, self.report = rerun, criterion, report

    @property
    def divisible(self) -> bool | None:
        """Whether the model can be run on a part of the samples; ``None`` until that was tried."""
        return self.report.divisible if self.report.looked else None

    @divisible.setter
    def divisible(self, value: bool) -> None:
        self.report.looked, self.report.divisible = True, value

    @property
    def apart(self) -> bool:
        """Whether a part then has the outputs in training mode that it has among all: not with dropout or a batch norm."""
        return self.report.apart

    @apart.setter
    def apart(self, value: bool) -> None:
        self.report.apart = value

    def part(self, batch: Batch, share: float) -> Part | None:
        """The samples that make up a share, or ``None`` where the model needs all of them."""
        samples = self._samples(batch)
        kept = max(1, math.ceil(round(share * samples, 6)))  # a seventh of seven is one
        if kept >= samples or not self._looked(batch, samples):
            return None
        if kept not in batch.parts:
            strata = self.strata(batch)
            even = Part.even(samples, kept, batch.output.device)
            batch.parts[kept] = even if strata is None else strata.part(kept)
        return batch.parts[kept]

    def strata(self, batch: Batch) -> Strata | None:
        """The samples by how much they matter.

        ``None`` where they are few, where their outputs are not those that they have among all, where outputs are large and
        where each has many terms of the loss.
        """
        samples = self._samples(batch)
        if samples < 2 * FEW or batch.output.numel() > LARGE:
            return None
        if not (self._looked(batch, samples) and self.apart):
            return None
        if batch.strata is None:
            if self.terms(batch) > LONG * samples:
                return None
            batch.strata = Strata(self._derivatives(batch).reshape(samples, -1))
        return batch.strata

    def _derivatives(self, batch: Batch) -> Tensor:
        """The derivatives of the samples' losses with respect to the outputs."""
        output, target = batch.output, batch.target
        residual = self.criterion.residual(
            output.to(torch.promote_types(output.dtype, torch.float32)), target
        )
        counted = self.criterion.counted(output, target)
        return residual if counted is None else torch.where(counted, residual, 0.0)

    def terms(self, batch: Batch) -> int:
        """How many terms the loss of a minibatch is the mean of."""
        if batch.terms is None:
            batch.terms = int(self.criterion.terms(batch.output, batch.target))
        return batch.terms

    @staticmethod
    def _samples(batch: Batch) -> int:
        """The number of samples; 0 where outputs or targets do not have as many rows for each."""
        samples = batch.call.samples
        assert batch.reading is not None
        divided = (
            samples and not batch.reading.shape[0] % samples and not len(batch.target) % samples
        )
        return samples if divided else 0

    def _looked(self, batch: Batch, samples: int) -> bool:
        """Whether the model can be run on a part of the samples, tried on a half of them the first time."""
        if not self.report.looked:
            half = Part.even(samples, math.ceil(samples / 2), batch.output.device)
            self.divisible = self._independent(batch, half)
            output = self.rerun.tried(batch, half) if self.divisible else None
            self.apart = output is not None and bool(self.alike(batch, output, half))
        return self.report.divisible

    def _independent(self, batch: Batch, part: Part) -> bool:
        """Whether a part of the samples, run alone in eval mode, gives the outputs that it has among all samples.

        Not so where samples depend on each other, or where they are not the first dimension of inputs and outputs.
        """
        training = [module for module in self.rerun.module.modules() if module.training]
        try:
            for module in training:
                module.training = False
            whole, some = self.rerun.run(batch, {}), self.rerun.run(batch, {}, part)
            expected = part.rows(whole)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # whatever the model raises if an input does not fit
            return False
        finally:
            for module in training:
                module.training = True
        return bool(_equal(batch, some, expected))

    def alike(self, batch: Batch, output: Tensor, part: Part | None) -> Tensor:
        """Whether the output of a part is that of the training pass: not if other dropout masks were drawn for it, say."""
        return _equal(batch, output, batch.output if part is None else part.rows(batch.output))


def _equal(batch: Batch, output: Tensor, other: Tensor) -> Tensor:
    """Whether outputs differ by rounding alone; what is not finite (a class that is ruled out) must be so in both."""
    if not other.numel():
        return torch.ones((), dtype=torch.bool, device=other.device)
    around = batch.call.around
    rough = around.dtype if around.autocast else batch.output.dtype
    finite = other.isfinite()
    known, found = torch.where(finite, other, 0.0), torch.where(finite, output, 0.0)
    close = (found - known).abs().amax() <= math.sqrt(torch.finfo(rough).eps) * known.abs().amax()
    return close & (finite == output.isfinite()).all()
