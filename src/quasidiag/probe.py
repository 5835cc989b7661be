"""Hooks that see a layer's activity and its pre-activations' place in the graph, and let go of them.

A forward hook takes the input ``a`` and the *gradient edge* of the output, before any in-place activation can touch
it. The derivative ``delta`` then arrives in one of two ways: the ordinary backward pass delivers it as it comes by
(outer product), or it is asked for along the edge (every other metric).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

Activity = Callable[[nn.Module, tuple[Any, ...]], Tensor]


class Seen(NamedTuple):
    """One call of a layer: its activity, the number of samples in the model's call, and which call that was."""

    module: nn.Module
    a: Tensor
    batch: int
    call: int


@dataclass(eq=False)
class Use:
    """One call of a layer, with its place in the graph."""

    module: nn.Module
    a: Tensor
    edge: GradientEdge
    input_edge: GradientEdge | None
    call: int = 0


class Hook:
    """A hook that does not travel: a copied or pickled model carries an inert one, not the optimizer."""

    def __init__(self, method: Callable[..., None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    @torch._disable_dynamo  # a compiled model pauses here: the graph's edges exist only outside
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)

    @staticmethod
    def sweep(module: nn.Module) -> None:
        """Take the inert hooks off a copied module."""
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, Hook) and (hook._method is None or hook._method() is None):
                    del hooks[key]


class Loan:
    """What a hook in the autograd graph holds of a batch; ``None`` once it was called back."""

    def __init__(self, lent: Any) -> None:
        self.lent = lent


class Loans:
    """Calls back at the step what the graph's hooks hold, however long the graph itself lives."""

    def __init__(self) -> None:
        self._loans: weakref.WeakSet[Loan] = weakref.WeakSet()

    def lend(self, thing: Any) -> Loan:
        loan = Loan(thing)
        self._loans.add(loan)
        return loan

    def call_back(self) -> None:
        for loan in list(self._loans):
            loan.lent = None
        self._loans.clear()


class Probe:
    """Watches the layers of a model while it trains.

    Args:
        model: whose ``training`` flag says whether to look at all.
        on_delta: called as ``on_delta(seen, delta)`` during the ordinary backward pass. Where it is ``None`` the
            calls are kept as :attr:`uses` instead, for whoever asks along the edges.
        on_output: called as ``on_output(batch)`` when a backward pass reaches the model's output.
    """

    def __init__(
        self,
        model: nn.Module,
        on_delta: Callable[[Seen, Tensor], None] | None,
        on_output: Callable[[int], None] | None = None,
    ) -> None:
        self.model = model
        self.uses: list[Use] = []
        self.loans = Loans()
        self.enabled = True
        #: The model's calls so far, and the number of samples in the last one.
        self.calls, self._batch, self._inside = 0, 0, False
        self._on_delta, self._on_output = on_delta, on_output
        self._activity: dict[nn.Module, Activity] = {}
        Hook.sweep(model)
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(Hook(self._entered), with_kwargs=True),
            model.register_forward_hook(Hook(self._left), always_call=True),
        ]

    def watch(self, layers: Iterable[tuple[nn.Module, Activity]]) -> None:
        """Watch these layers, each with the function that takes its activity out of its arguments, and no others."""
        wanted = dict(layers)
        for module in wanted:
            if module not in self._activity:
                Hook.sweep(module)
                self._handles.append(module.register_forward_hook(Hook(self._seen)))
        self._activity = wanted

    @property
    def active(self) -> bool:
        """Whether this is a training pass: not evaluation, not under ``no_grad``."""
        return self.enabled and self.model.training and torch.is_grad_enabled()

    def _entered(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: how many samples are there?"""
        if self.active:
            first = next((x for x in tensors((args, kwargs)) if x.dim()), None)
            self._batch = 0 if first is None else first.shape[0]
            self._inside = True
            self.calls += 1

    def _left(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inside, self._inside = self._inside, False
        if not (inside and self._on_output is not None and self.active):
            return
        on_output, batch = self._on_output, self._batch
        for x in tensors(output):
            if x.requires_grad:
                x.register_hook(lambda gradient: on_output(batch) if batch else None)

    def _seen(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        activity = self._activity.get(module)
        if activity is None or not (
            self.active and isinstance(output, Tensor) and output.requires_grad
        ):
            return
        a = activity(module, args)
        edge = get_gradient_edge(output)
        recomputed = torch._C._current_graph_task_id() != -1  # a checkpoint's second forward pass
        if self._on_delta is None:
            if not recomputed:  # which has no edges to ask along
                source = get_gradient_edge(a) if a.requires_grad else None
                self.uses.append(Use(module, a.detach(), edge, source, self.calls))
            return
        batch = self._batch if self._batch and (self._inside or recomputed) else a.shape[0]
        loan = self.loans.lend(Seen(module, a.detach(), batch, self.calls))
        on_delta, number = self._on_delta, edge.output_nr

        def deliver(gradients: tuple[Tensor | None, ...]) -> None:
            delta = gradients[number]
            if delta is not None and loan.lent is not None:
                on_delta(loan.lent, delta)

        edge.node.register_prehook(deliver)

    def clear(self) -> None:
        """Forget every call seen so far."""
        self.uses.clear()
        self.loans.call_back()

    def close(self) -> None:
        """Leave no hook behind."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from tensors(branch)
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from tensors(branch)
