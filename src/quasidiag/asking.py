"""Backpropagation of given vectors to the pre-activations of the watched layers, and no further.

Asking ``autograd.grad`` for all layers would hold all their derivatives in memory at once. So it is asked only for the
lowest layers; hooks report the derivatives of the layers above as the pass goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from quasidiag.probe import Deltas, Use, below

#: Autograd nodes of elementwise functions: each multiplies a derivative by a slope that is the same for every vector.
ELEMENTWISE = {
    f"{name}Backward0"
    for name in ("Sigmoid", "Tanh", "Relu", "Gelu", "Silu", "Softplus", "Elu", "LeakyRelu", "Mish")
}


class Asking:
    """Calls ``take(use, deltas)`` once in every pass for each of ``uses`` that ``output`` depends on.

    ``autograd.grad`` is asked for layers whose input needs no derivative and for composite layers, which need the
    derivatives of all their outputs. The first pass shows which others it must be asked for (layers above parameters
    that nobody watches).

    For uses in ``above`` (see :func:`activations`) the derivative is taken at the output of their activation function.
    """

    def __init__(
        self,
        output: Tensor,
        uses: list[Use],
        take: Callable[[Use, Deltas], None],
        above: Mapping[Use, Node],
    ) -> None:
        self._output, self._uses, self._take, self._above = output, uses, take, above
        self._lowest = [u for u in uses if u.input_edge is None or len(u.edges) > 1] or uses[:1]
        self._asked, self._heard = set(self._lowest), set[Use]()
        self._asking = False
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Asking:
        self._handles += [self._listen(use) for use in self._uses if use not in self._asked]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _listen(self, use: Use) -> RemovableHandle:
        number = use.edge.output_nr

        def hear(gradients: Deltas) -> None:
            delta = gradients[number]
            if delta is not None and self._asking and use not in self._asked:
                self._heard.add(use)
                self._take(use, [delta])

        return use.edge.node.register_prehook(hear)

    def backpropagate(self, vector: Tensor) -> None:
        """Run one backward pass with ``vector`` as the derivative at the output."""
        self._asking = True
        self._ask_for(self._lowest, vector)
        self._asking = False
        missed = [use for use in self._uses if use not in self._asked and use not in self._heard]
        self._asked.update(missed)
        self._lowest += missed
        self._ask_for(missed, vector)

    def _ask_for(self, uses: list[Use], vector: Tensor) -> None:
        if not uses:
            return
        edges = ([GradientEdge(self._above[u], 0)] if u in self._above else u.edges for u in uses)
        deltas = _gradients(self._output, [edge for some in edges for edge in some], vector)
        deltas.reverse()
        for use in uses:
            mine = [deltas.pop() for _ in use.edges]
            if any(delta is not None for delta in mine):
                self._take(use, mine)


def activations(output: Tensor, uses: list[Use]) -> dict[Use, Node]:
    """The activation's autograd node, for each lowest dense layer whose output goes into one activation and nowhere else.

    With many vectors, derivatives can then be taken above the activation and multiplied by its slope once at the end.
    """
    takers: dict[tuple[Node | None, int], list[Node]] = {}
    for node in below(output):
        for edge in node.next_functions:
            takers.setdefault(edge, []).append(node)
    found = {}
    for use in uses:
        nodes = takers.get((use.edge.node, use.edge.output_nr), [])
        lowest = isinstance(use.module, nn.Linear) and use.input_edge is None
        if lowest and len(nodes) == 1 and nodes[0].name() in ELEMENTWISE:
            found[use] = nodes[0]
    return found


def _gradients(output: Tensor, edges: list[GradientEdge], vector: Tensor) -> list[Tensor | None]:
    try:
        return [*torch.autograd.grad(output, edges, vector, retain_graph=True, allow_unused=True)]
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise RuntimeError(
            "activation checkpointing with use_reentrant=True lets nobody ask for derivatives, which every metric but "
            "the outer product does: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
            "metric='outer-product'"
        ) from error
