r"""The backpropagated metric (Ollivier 2015): one pass, whatever the number of outputs.

At the output the weights are the diagonal of the Fisher matrix; through a layer and the activation below it they go as

.. math:: m ← (m W^{∘2}) · f'(z)^2.

Covers feed-forward chains: each layer's input is an elementwise function of the pre-activations of the one before, in the
same order. The activation's derivative is read off the graph itself, so that it may be any function, and a dropout
mask is the one that the gradient sees.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from quasidiag.outputs import OutputModel
from quasidiag.probe import Use


def weights(
    criterion: OutputModel, output: Tensor, target: Tensor, uses: list[Use]
) -> list[Tensor]:
    """The weights ``m`` of each layer's pre-activations, for layers in the order in which they ran."""
    m = criterion.fisher(output.detach())
    counted = criterion.counted(output, target)
    if counted is not None:
        m = torch.where(counted, m, 0.0)
    found: list[Tensor] = []
    above: GradientEdge = get_gradient_edge(output)
    for use in reversed(uses):
        if not isinstance(use.module, nn.Linear):
            raise TypeError(
                f"the backpropagated metric covers chains of Linear layers, not {type(use.module).__name__}: "
                "use metric='outer-product' or 'monte-carlo'"
            )
        shape = torch.Size([*use.a.shape[:-1], use.module.out_features])
        m = m.reshape(shape) * slope(above, use.edge, m, shape).square()
        found.append(m)
        if use.input_edge is None:
            break
        above = use.input_edge
        m = m @ use.module.weight.detach().to(m.dtype).square()
    if len(found) < len(uses):
        raise TypeError(
            "the backpropagated metric needs a feed-forward chain: a layer's input does not depend on the layer before it"
        )
    return found[::-1]


def reached(output: Tensor, uses: list[Use]) -> list[Use]:
    """Those of ``uses`` that ``output`` depends on."""
    nodes, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [below for below, _ in node.next_functions]
    return [use for use in uses if use.edge.node in nodes]


def slope(above: GradientEdge, below: GradientEdge, like: Tensor, shape: torch.Size) -> Tensor:
    """The derivative of ``above`` with respect to ``below``, where one is an elementwise function of the other."""
    if above == below:
        return torch.ones(shape, dtype=like.dtype, device=like.device)
    ones = torch.ones_like(like)
    signs = ones.clone()
    signs.view(-1)[::2] = -1.0
    plain, signed = (
        torch.autograd.grad(above, below, v, retain_graph=True, allow_unused=True)[0]
        for v in (ones, signs)
    )
    expected = None if plain is None else plain.reshape_as(like) * signs
    if expected is None or not torch.allclose(signed.reshape_as(like), expected, equal_nan=True):
        raise TypeError(
            "the backpropagated metric needs elementwise activations between layers, each layer fed by the one before: "
            "use metric='outer-product' or 'monte-carlo'"
        )
    return plain.reshape(shape)
