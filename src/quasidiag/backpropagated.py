r"""The backpropagated metric (Ollivier 2015): one pass, whatever the number of outputs.

The weights :math:`m` start as the diagonal of the Fisher matrix at the output. Through a layer and the activation below it,

.. math:: m ← (m W^{∘2}) · f'(z)^2.

Covers feed-forward chains: each layer's input is an elementwise function of the pre-activations of the one before, in
the same order. The derivative :math:`f'(z)` comes from autograd, so the activation may be any elementwise function, and
dropout has the same mask as for the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from quasidiag.outputs import OutputModel
from quasidiag.probe import Use

NO_CHAIN = (
    "the backpropagated metric needs a feed-forward chain with elementwise activations, each layer fed by the one "
    "before and by nothing else: use metric='outer-product' or 'monte-carlo'"
)


def weights(
    criterion: OutputModel, output: Tensor, target: Tensor, uses: list[Use]
) -> list[Tensor]:
    """The weights ``m`` of each layer's pre-activations, for layers in the order in which they ran.

    An ordinary vector is carried back along with ``m`` and compared with autograd's result at the bottom. Otherwise a
    path outside the chain (a skip connection, a function that mixes units) would be missed silently.
    """
    delta = _signs(output)
    (true,) = torch.autograd.grad(output, uses[0].edge, delta, retain_graph=True, allow_unused=True)
    if true is None:
        raise TypeError(NO_CHAIN)
    true = _sketch(true)  # now, to free its memory for the weights
    m = criterion.fisher(output.detach())
    counted = criterion.counted(output, target)
    if counted is not None:
        m = torch.where(counted, m, 0.0)
    found: list[Tensor] = []
    upper = delta  # a placeholder: from the second layer on, the weight of the layer above
    above: GradientEdge | None = get_gradient_edge(output)
    for use in reversed(uses):
        if not isinstance(use.module, nn.Linear):
            raise TypeError(
                f"the backpropagated metric covers chains of Linear layers, not {type(use.module).__name__}: "
                "use metric='outer-product' or 'monte-carlo'"
            )
        if found:
            m = m @ upper.to(m.dtype).square()
            delta = delta @ upper.to(delta.dtype)
        own = bool(found)  # then m is a new product that nobody else holds: write into it
        shape = torch.Size([*use.a.shape[:-1], use.module.out_features])
        f = None if above is None else slope(above, use.edge, delta, shape)
        if f is None:
            raise TypeError(NO_CHAIN)
        m = m.reshape(shape)
        own = own and torch.promote_types(m.dtype, f.dtype) == m.dtype
        m, delta = (m.mul_(f) if own else m * f).mul_(f), delta.reshape(shape).mul_(f)
        found.append(m)
        del f  # it is as large as the layer's output
        above, upper = use.input_edge, use.module.weight.detach()
    if not _close(_sketch(delta), true):
        raise TypeError(NO_CHAIN)
    return found[::-1]


def _signs(output: Tensor) -> Tensor:
    signs = torch.ones_like(output, memory_format=torch.contiguous_format)
    signs.view(-1)[::2] = -1.0
    return signs


def _sketch(x: Tensor) -> Tensor:
    """A few random sums over samples for each unit. They are small, and tensors that agree in them are equal."""
    x = x.reshape(-1, x.shape[-1])
    source = torch.Generator(x.device).manual_seed(0)
    return torch.randn(8, len(x), generator=source, dtype=x.dtype, device=x.device) @ x


def slope(
    above: GradientEdge, below: GradientEdge, like: Tensor, shape: torch.Size
) -> Tensor | None:
    """The derivative of ``above`` by ``below``, taken as an elementwise function; ``None`` if it cannot be one."""
    if above == below:
        return like.new_ones(()).expand(shape)
    ones = like.new_ones(()).expand_as(like)
    (found,) = torch.autograd.grad(above, below, ones, retain_graph=True, allow_unused=True)
    return None if found is None or found.numel() != shape.numel() else found.reshape(shape)


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether the two are equal up to rounding. Differences that are not finite pass: the optimizer reports those."""
    error, size = (one - other).norm(), other.norm()
    tolerance = min(0.1, 10 * torch.finfo(other.dtype).eps ** 0.5)
    return bool(error <= tolerance * size) or not bool(error.isfinite())
