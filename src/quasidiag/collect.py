r"""From forward and backward passes to weighted activities: what the metric is made of.

A :class:`Collector` watches a model train and keeps, until the optimizer's step, a list of :class:`Record`: a layer, its
activity ``a`` and the weights ``w``, such that the sum of :math:`w (1, a)(1, a)^⊤` over all of them is the metric of the
minibatch. Which vectors were backpropagated to get ``w`` is all that the metrics differ in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.utils.hooks import RemovableHandle

from quasidiag import backpropagated
from quasidiag.layers import Adapter
from quasidiag.metrics import cotangents
from quasidiag.moments import square
from quasidiag.outputs import OutputModel
from quasidiag.probe import Hook, Probe


class Record(NamedTuple):
    """One call of a layer, as the metric sees it."""

    module: nn.Module
    a: Tensor
    w: Tensor


class Collector:
    """Watches ``model`` and ``criterion``; see the module.

    Args:
        model: the model that is trained.
        adapters: the layers to watch.
        criterion: the output model, or ``None`` for the outer product metric of any loss.
        metric: one of ``metrics.METRICS``.
        samples: draws per sample, for the Monte Carlo metric.
        fraction: the share of each minibatch that enters the metric.
        loss_reduction: what the loss does over the batch, where there is no criterion to know it.
        seed: of the generator that the Monte Carlo targets are drawn from.
    """

    def __init__(
        self,
        model: nn.Module,
        adapters: dict[nn.Module, Adapter],
        criterion: OutputModel | None,
        metric: str,
        samples: int = 1,
        fraction: float = 1.0,
        loss_reduction: str = "mean",
        seed: int = 0,
    ) -> None:
        self.criterion, self.metric, self.samples = criterion, metric, samples
        self.fraction, self.loss_reduction, self.seed = fraction, loss_reduction, seed
        self.generator: Generator | None = None
        self.records: list[Record] = []
        #: Backward passes since the last step, and the samples in them.
        self.passes = 0
        self.total: int | Tensor = 0
        self._batch: int | Tensor = 0
        self._scale: float | Tensor = 1.0
        self._in_pass = False
        layers = [(module, adapter.activity) for module, adapter in adapters.items()]
        along = self._deliver if metric == "outer-product" else None
        self.probe = Probe(model, layers, along)
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(Hook(self._called), with_kwargs=True)
        ]
        if criterion is not None:
            self._handles.append(criterion.register_forward_hook(Hook(self._judged)))

    def factor(self) -> float | Tensor:
        r"""What makes the sum over the records a mean over samples.

        Without a criterion, the loss of each of *k* passes is taken to be divided by *k*, as is the custom when
        gradients are accumulated.
        """
        if self.criterion is None and self.loss_reduction == "mean":
            return self.passes**2 / self.total
        return 1 / self.total

    def _called(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass: how many samples there are, should nobody say better."""
        if self.criterion is None and self.probe.active:
            tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim())
            self._batch = next((x.shape[0] for x in tensors), 1)
            self._scale = float(self._batch) if self.loss_reduction == "mean" else 1.0

    def _judged(self, criterion: OutputModel, args: tuple[Tensor, ...], loss: Tensor) -> None:
        """After the criterion: when the backward pass begins at its loss, collect."""
        if not (self.probe.active and loss.requires_grad):
            return
        output, target = args

        def begin(gradient: Tensor) -> None:
            terms = criterion.terms(output, target)
            self._begin(terms, terms / gradient)
            if self.metric != "outer-product":
                self._ask(criterion, output, target)

        loss.register_hook(begin)

    def _begin(self, batch: int | Tensor, scale: float | Tensor) -> None:
        """A backward pass begins: the gradient of its loss is ``batch/scale`` times that of the samples' sum."""
        if self._in_pass:
            return
        self._in_pass = True
        self._scale = scale
        self.passes += 1
        self.total = self.total + batch
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._in_pass = False

    def _deliver(self, module: nn.Module, a: Tensor, delta: Tensor) -> None:
        """The ordinary backward pass comes by: the outer product metric."""
        if self.criterion is None:
            self._begin(self._batch, self._scale)
        elif not self._in_pass:
            return  # a loss that is not the criterion's
        share = max(1, round(self.fraction * a.shape[0])) if self.fraction < 1 else a.shape[0]
        more = self._scale * (a.shape[0] / share) ** 0.5
        delta = delta[:share].to(_metric_dtype(delta)) * more
        self.records.append(Record(module, a[:share], square(delta, delta.dtype)))

    def _ask(self, criterion: OutputModel, output: Tensor, target: Tensor) -> None:
        """Backpropagate the metric's own vectors, to the pre-activations and no further."""
        uses, self.probe.uses = self.probe.uses, []
        if not uses:
            return
        if self.metric == "backpropagated":
            weights = backpropagated.weights(criterion, output, target, uses)
            self.records += [Record(use.module, use.a, w) for use, w in zip(uses, weights)]
            return
        edges = [use.edge for use in uses]
        sums: list[Tensor | None] = [None] * len(uses)
        vectors = cotangents(
            self.metric, criterion, output, target, self.samples, self._generator(output.device)
        )
        for vector in vectors:
            deltas = torch.autograd.grad(
                output, edges, vector.to(output.dtype), retain_graph=True, allow_unused=True
            )
            for i, delta in enumerate(deltas):
                if delta is not None:
                    w = square(delta, _metric_dtype(delta))
                    sums[i] = w if sums[i] is None else sums[i].add_(w)  # type: ignore[union-attr]
        self.records += [
            Record(use.module, use.a, w) for use, w in zip(uses, sums) if w is not None
        ]

    def _generator(self, device: torch.device) -> Generator:
        if self.generator is None:
            self.generator = Generator(device).manual_seed(self.seed)
        return self.generator

    def clear(self) -> None:
        """Let go of the batch."""
        self.records, self.passes, self.total = [], 0, 0
        self.probe.clear()

    def close(self) -> None:
        """Leave no hook behind."""
        self.clear()
        self.probe.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _metric_dtype(delta: Tensor) -> torch.dtype:
    return torch.promote_types(delta.dtype, torch.float32)
