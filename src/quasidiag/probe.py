"""Hooks that see a layer's activity and its pre-activations' place in the graph, and let go of them.

A forward hook takes the input ``a`` and the *gradient edge* of the output, before any in-place activation can touch
it. The derivative ``delta`` then arrives in one of two ways: the ordinary backward pass delivers it as it comes by
(outer product), or it is asked for along the edge (every other metric).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle


@dataclass(eq=False)
class Use:
    """One call of a layer in a forward pass."""

    module: nn.Module
    a: Tensor
    edge: GradientEdge
    input_edge: GradientEdge | None


class Hook:
    """A hook that does not travel: a copied or pickled model carries an inert one, not the optimizer."""

    def __init__(self, method: Callable[..., None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)


class Probe:
    """Watches the layers of a model while it trains.

    Args:
        model: whose ``training`` flag says whether to look at all.
        layers: the layers to watch, each with the function that takes its activity out of its arguments.
        on_delta: called as ``on_delta(module, a, delta)`` during the ordinary backward pass. Where it is ``None`` the
            calls are kept as :attr:`uses` instead, for whoever asks along the edges.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[tuple[nn.Module, Callable[[nn.Module, tuple[Any, ...]], Tensor]]],
        on_delta: Callable[[nn.Module, Tensor, Tensor], None] | None,
    ) -> None:
        self.model = model
        self.uses: list[Use] = []
        self.enabled = True
        self._on_delta = on_delta
        self._activity = dict(layers)
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(Hook(self._seen)) for module in self._activity
        ]

    @property
    def active(self) -> bool:
        """Whether this is a training pass: not evaluation, not under ``no_grad``."""
        return self.enabled and self.model.training and torch.is_grad_enabled()

    def _seen(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not (self.active and isinstance(output, Tensor) and output.requires_grad):
            return
        a = self._activity[module](module, args)
        edge = get_gradient_edge(output)
        if self._on_delta is None:
            if torch._C._current_graph_task_id() == -1:  # a checkpoint's recomputation has no edges
                source = get_gradient_edge(a) if a.requires_grad else None
                self.uses.append(Use(module, a.detach(), edge, source))
            return
        a, on_delta, number = a.detach(), self._on_delta, edge.output_nr

        def deliver(gradients: tuple[Tensor | None, ...]) -> None:
            delta = gradients[number]
            if delta is not None:
                on_delta(module, a, delta)

        edge.node.register_prehook(deliver)

    def clear(self) -> None:
        """Forget every call seen so far."""
        self.uses.clear()

    def close(self) -> None:
        """Leave no hook behind."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
