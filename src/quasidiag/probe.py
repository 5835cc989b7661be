"""Hooks that record each layer's activity and where its pre-activations are in the autograd graph.

A forward hook takes the input ``a`` and the *gradient edge* of the output, before any in-place activation can touch
it. The derivative ``delta`` then arrives in one of two ways: the ordinary backward pass delivers it as it comes by
(outer product), or it is asked for along the edge (every other metric). Either way the graph itself holds the record,
which is freed with the graph, whether a backward pass came or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from quasidiag.hidden import hidden
from quasidiag.layers.base import Adapter
from quasidiag.layers.composite import Call, Composite, Rerun, Surroundings, arguments
from quasidiag.sharding import is_sharded

Deltas = Sequence[Tensor | None]
Layout = Callable[[Tensor | None], Tensor | None]


class Seen(NamedTuple):
    """One call of a layer: its activity, the number of samples in the model's call, and that call's number."""

    module: nn.Module
    a: Tensor | Rerun
    batch: int
    call: int

    def calls(self, deltas: Deltas) -> list[Call]:
        """The layer, or the dense layers inside it, with activity and derivative, given the derivatives of its outputs."""
        if isinstance(self.a, Rerun):
            return self.a.calls(deltas)
        return [Call(self.module, self.a, delta) for delta in deltas if delta is not None]


class Place:
    """Where in the graph the derivative of an output arrives, even if that output is changed in place later.

    An in-place operation on a view rewrites the history of the view's base, and the view's own node is never run. So
    for a view the place is that of its base, whose derivative is rearranged into the view's layout. This holds for the
    ``first`` output only: others may be views of tensors that the layer itself goes on to use.
    """

    def __init__(self, output: Tensor, first: bool) -> None:
        base = output._base if first else None
        whole = base is not None and base.numel() == output.numel() and base.is_contiguous()
        viewed = whole and base is not None and base.requires_grad
        self.tensor = base if viewed and base is not None else output
        self._strides = (output.shape, output.stride()) if viewed else None

    @property
    def edge(self) -> GradientEdge:
        return get_gradient_edge(self.tensor)

    def layout(self) -> Layout:
        """A function that rearranges the derivative that arrives into the output's layout; it holds no tensor."""
        strides = self._strides

        def bring(gradient: Tensor | None) -> Tensor | None:
            if gradient is None or strides is None:
                return gradient
            gradient = gradient.contiguous()
            return gradient.as_strided(*strides, gradient.storage_offset())

        return bring


class Note(NamedTuple):
    """What the graph holds of a call. No edge of the call's own outputs: the graph would keep itself alive."""

    seen: Seen
    layouts: list[Layout]
    input_edge: GradientEdge | None


@dataclass(eq=False)
class Use:
    """One call of a layer, with the gradient edges of its outputs, by number; only of outputs that the loss depends on."""

    loan: Loan
    note: Note
    places: dict[int, GradientEdge]

    def calls(self, gradients: Deltas) -> list[Call]:
        """As :meth:`Seen.calls`, given the derivatives that arrived at the :attr:`edges`."""
        arrived = dict(zip(self.places, gradients))
        return self.seen.calls([f(arrived.get(i)) for i, f in enumerate(self.note.layouts)])

    @property
    def seen(self) -> Seen:
        return self.note.seen

    @property
    def edges(self) -> list[GradientEdge]:
        return [*self.places.values()]

    @property
    def input_edge(self) -> GradientEdge | None:
        return self.note.input_edge

    @property
    def module(self) -> nn.Module:
        return self.seen.module

    @property
    def a(self) -> Any:
        return self.seen.a

    @property
    def edge(self) -> GradientEdge:
        return self.edges[0]

    @property
    def call(self) -> int:
        return self.seen.call


class Hook:
    """A hook that a copied or pickled model keeps as one that does nothing, so that the optimizer is not copied along."""

    def __init__(self, method: Any) -> None:
        # What a WeakMethod is, but without a call of its own: a small network's step calls dozens of hooks.
        self._owner = None if method is None else weakref.ref(method.__self__)
        self._function: Any = None if method is None else method.__func__

    @hidden
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            self._function(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None)

    def __reduce__(self) -> tuple[type[Hook], tuple[None]]:
        return Hook, (None,)

    @staticmethod
    def sweep(module: nn.Module) -> None:
        """Remove from a module the hooks that do nothing, which copying has left there."""
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, Hook) and (hook._owner is None or hook._owner() is None):
                    del hooks[key]


class Outside:
    """A hook in the graph that is never compiled, not even if ``backward()`` is called in a compiled function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @hidden
    def __call__(self, *args: Any) -> None:
        self._function(*args)


class Loan:
    """Data of a batch that the autograd graph holds; ``lent`` is ``None`` once they were called back."""

    def __init__(self, lent: Any) -> None:
        self.lent = lent


class Loans:
    """All that the graph holds, in order. It is called back at the step, so that a graph that lives on holds no batch."""

    def __init__(self) -> None:
        self._loans: weakref.WeakValueDictionary[int, Loan] = weakref.WeakValueDictionary()
        self._numbers = count()

    def __iter__(self) -> Iterator[Loan]:
        kept = [reference() for reference in self._loans.valuerefs()]
        return iter([loan for loan in kept if loan is not None])

    def lend(self, thing: Any) -> Loan:
        """A loan of ``thing``, known here as long as it is kept by a hook in the graph or by a node (:meth:`leave`)."""
        loan = Loan(thing)
        self._loans[next(self._numbers)] = loan
        return loan

    def leave(self, node: Node, left: Any) -> None:
        """Let a node of the graph hold something, such as a loan."""
        _of(node).setdefault(self, []).append(left)

    def left(self, node: Node) -> Sequence[Any]:
        """What :meth:`leave` gave this node."""
        return _of(node).get(self, ())

    def call_back(self) -> None:
        for loan in self:
            loan.lent = None
        if self._loans:
            self._loans.clear()


def _of(node: Node) -> dict[Any, list[Any]]:
    """The dictionary in which a node keeps data for others; torch's stubs take ``metadata`` for a method."""
    kept: dict[Any, list[Any]] = node.metadata  # type: ignore[assignment]
    return kept


class Probe:
    """Watches the layers of a model while it trains.

    Args:
        model: the model; it is watched only while its ``training`` flag is set.
        on_delta: called as ``on_delta(seen, deltas)``, with a derivative for each output, during the ordinary backward
            pass. If it is ``None``, derivatives can be asked for along the edges of :meth:`uses` instead.
        on_output: called as ``on_output(batch)`` when a backward pass reaches the model's output.
        on_call: called when the model is called in training.
    """

    def __init__(
        self,
        model: nn.Module,
        on_delta: Callable[[Seen, Deltas], None] | None,
        on_output: Callable[[int], None] | None = None,
        on_call: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.loans = Loans()
        self.enabled = True
        #: The model's calls so far, and the number of samples in the last one.
        self.calls, self._batch, self._inside = 0, 0, False
        self._on_delta, self._on_output, self._on_call = on_delta, on_output, on_call
        self._adapters: dict[nn.Module, Adapter] = {}
        self._parts: dict[nn.Module, dict[str, nn.Module]] = {}
        self._around: dict[nn.Module, Surroundings] = {}
        #: Layers that ran only in a checkpoint's second forward pass.
        self.recomputed: set[nn.Module] = set()
        Hook.sweep(model)
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(Hook(self._entered), with_kwargs=True),
            model.register_forward_hook(Hook(self._left), always_call=True),
        ]

    def watch(
        self,
        layers: dict[nn.Module, Adapter],
        parts: dict[nn.Module, dict[str, nn.Module]] | None = None,
    ) -> None:
        """Watch these layers and no others; ``parts`` are the dense layers inside the composite ones."""
        for module, adapter in layers.items():
            if module not in self._adapters:
                Hook.sweep(module)
                seen = module.register_forward_hook(Hook(self._seen), with_kwargs=True)
                self._handles.append(seen)
                if isinstance(adapter, Composite):
                    before = module.register_forward_pre_hook(Hook(self._before))
                    self._handles.append(before)
        self._adapters, self._parts = dict(layers), dict(parts or {})

    @property
    def active(self) -> bool:
        """Whether this is a training pass: not evaluation, not under ``no_grad``."""
        return self.enabled and self.model.training and torch.is_grad_enabled()

    def _entered(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """When the model is called: note the number of samples, the first dimension of its first tensor argument."""
        if self.active:
            if self._on_call is not None:
                self._on_call()
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
                x.register_hook(Outside(lambda gradient: on_output(batch) if batch else None))

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before a composite layer runs: remember the random state and autocast that its forward pass depends on."""
        adapter = self._adapters.get(module)
        if self.active and isinstance(adapter, Composite):
            device = next(module.parameters()).device
            self._around[module] = Surroundings(device, adapter.random(module))

    def _seen(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        adapter = self._adapters.get(module) if self.active else None
        if adapter is None:
            return
        outputs: list[Tensor] = [output]
        if isinstance(adapter, Composite):
            outputs = adapter.outputs(module, output)
        if not all(isinstance(y, Tensor) for y in outputs):
            return
        if not any(y.requires_grad for y in outputs):
            return
        recomputed = torch._C._current_graph_task_id() != -1  # a checkpoint's second forward pass
        if self._on_delta is None and recomputed:  # no edges to ask along there
            self.recomputed.add(module)
            return
        a: Any
        if isinstance(adapter, Composite):
            around = self._around.pop(module)
            a = Rerun(adapter, module, self._parts[module], args, kwargs, outputs, around)
            self._check_layout(module, a, recomputed)
            source = None
        else:
            if kwargs:
                args = tuple(arguments(module, args, kwargs).values())
            a = adapter.activity(module, args)
            source = get_gradient_edge(a) if self._on_delta is None and a.requires_grad else None
            a = a.detach()
        inside = self._inside or recomputed
        batch = self._batch if self._batch and inside else len(a)
        seen = Seen(module, a, batch, self.calls)
        places = [Place(y, i == 0) for i, y in enumerate(outputs) if y.requires_grad]
        layouts = [place.layout() for place in places]
        if self._on_delta is None:
            noted = self.loans.lend(Note(seen, layouts, source))
            for number, place in enumerate(places):
                self.loans.leave(place.edge.node, (noted, number, place.edge.output_nr))
            return
        loan, on_delta = self.loans.lend(seen), self._on_delta

        def deliver(gradients: Deltas) -> None:
            if loan.lent is not None and any(g is not None for g in gradients):
                on_delta(loan.lent, [bring(g) for bring, g in zip(layouts, gradients)])

        if len(places) > 1:
            register_multi_grad_hook([place.tensor for place in places], Outside(deliver))
            return
        edge = places[0].edge
        number = edge.output_nr
        edge.node.register_prehook(Outside(lambda gradients: deliver([gradients[number]])))

    def _check_layout(self, module: nn.Module, rerun: Rerun, recomputed: bool) -> None:
        """Raise if the model input's first dimension is not the batch: without a criterion samples are counted along it."""
        counted = self._batch if self._inside or recomputed else 0
        if self._on_output is not None and rerun.batch_second == counted != len(rerun):
            raise ValueError(
                f"{type(module).__name__} has the batch second ({len(rerun)} samples), and the model's input has "
                f"{counted} along its first dimension, where quasidiag counts samples if there is no criterion: give "
                "the model its batch first (and batch_first=True to the layer), or pass a criterion such as "
                "qd.Categorical()"
            )

    def uses(self, output: Tensor, without: Collection[Loan] = ()) -> list[Use]:
        """The calls of layers that an output depends on, in the order in which they were made."""
        found: dict[Loan, dict[int, GradientEdge]] = {}
        for node in below(output):
            for loan, number, output_nr in self.loans.left(node):
                if loan.lent is not None and loan not in without:
                    found.setdefault(loan, {})[number] = GradientEdge(node, output_nr)
        return [Use(loan, loan.lent, found[loan]) for loan in self.loans if loan in found]

    def clear(self) -> None:
        """Forget all calls so far."""
        self.recomputed.clear()
        self.loans.call_back()

    def close(self) -> None:
        """Remove all hooks."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def tensors(tree: Any, inside: tuple[int, ...] = ()) -> list[Tensor]:
    """The tensors in nested tuples, lists, dictionaries and dataclasses, in order; skips containers it is ``inside`` of."""
    if isinstance(tree, Tensor):
        return [tree]
    if id(tree) in inside:
        return []
    inside = *inside, id(tree)
    return [x for branch in branches(tree) for x in tensors(branch, inside)]


def branches(tree: Any) -> Iterable[Any]:
    """The values in a container; of a dataclass, those of the fields that are set."""
    if isinstance(tree, dict):
        return tree.values()
    if isinstance(tree, tuple | list):
        return tree
    return [getattr(tree, name) for name in names(tree)]


def names(tree: Any) -> list[str]:
    """The names of the fields that are set in a dataclass; none for other objects."""
    known = fields(tree) if is_dataclass(tree) and not isinstance(tree, type) else ()
    return [field.name for field in known if hasattr(tree, field.name)]


def reaches(output: Tensor, parameters: Iterable[Tensor]) -> bool:
    """Whether the current backward pass, now at ``output``, goes on to a parameter; ``grad`` by an input does not.

    Assumed where the graph shows no parameter (in a reentrant checkpoint, or with ``fully_shard``) and some are trained.
    """
    own = {id(p): p for p in parameters}
    passed = False
    for node in below(output):
        p = own.get(id(leaf(node)))
        if p is not None and p.requires_grad and not is_sharded(p):
            if _runs(node):
                return True
            passed = True
    return not passed and any(p.requires_grad for p in own.values())


def leaf(node: Node) -> Tensor | None:
    """The leaf, such as a parameter, whose gradient this node of the graph accumulates; ``None`` for other nodes."""
    adds = type(node).__name__ == "AccumulateGrad"  # other nodes may have an attribute of that name
    return getattr(node, "variable", None) if adds else None


def _runs(node: Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # ``grad`` was asked for this node's gradient
        return True


def below(output: Tensor) -> Iterator[Node]:
    """The nodes of the graph that ``output`` depends on."""
    seen: set[Node] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
            yield node
