r"""A linear layer in which every unit has only a few inputs (the sparse network of the paper's Figure 5).

.. math:: y_{nk} = b_k + \sum_j w_{kj}\, a_{n,\, \mathrm{index}_{kj}}

Nothing here has the size of the dense matrix. The product is an ``embedding_bag`` over the
transposed batch (the "words" are inputs, the "sentences" units). The backward pass uses another
one, over the connections sorted by input, for the product with the transposed matrix. Both sum in a
fixed order, so a run can be repeated bit for bit. The weight's gradient is one dot product per
connection; the moments of the metric have the same form, so the adapter at the end is all that the
Riemannian optimizers need.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quasidiag as qd


class _Product(torch.autograd.Function):
    """The sparse matrix product ``[in, N] → [units, N]`` and its derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SparseLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.embedding_bag(layer.index, x, per_sample_weights=weight, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        layer, grad = ctx.layer, grad.contiguous()
        to_x = layer.transposed_product(weight, grad) if ctx.needs_input_grad[0] else None
        to_weight = layer.connection_products(x, grad) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, None


class SparseLinear(nn.Module):
    """Each of ``out_features`` units has ``fan_in`` different inputs, drawn once.

    Parameters are ``weight [out_features, fan_in]`` and ``bias [out_features]``; the buffer
    ``index`` says which input each weight belongs to. Inputs may have any leading shape.
    """

    index: Tensor
    order: Tensor
    units: Tensor
    offsets: Tensor

    def __init__(
        self, in_features: int, out_features: int, fan_in: int, seed: int | torch.Generator = 0
    ) -> None:
        super().__init__()
        if not 1 <= fan_in <= in_features:
            raise ValueError(f"fan_in must be between 1 and {in_features}, not {fan_in}")
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        rows = [
            torch.randperm(in_features, generator=generator)[:fan_in] for _ in range(out_features)
        ]
        index = torch.stack(rows).sort(1).values
        order = index.flatten().argsort(stable=True)
        counts = index.flatten().bincount(minlength=in_features)
        self.in_features, self.out_features, self.fan_in = in_features, out_features, fan_in
        self.weight = nn.Parameter(torch.empty(out_features, fan_in))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.normal_(self.weight, std=1 / math.sqrt(fan_in), generator=generator)
        self.register_buffer("index", index)
        # The transposed structure: connections sorted by input, and where each input's connections begin.
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("units", order // fan_in, persistent=False)
        self.register_buffer("offsets", counts.cumsum(0) - counts, persistent=False)

    def forward(self, a: Tensor) -> Tensor:
        if a.shape[-1] != self.in_features:
            raise ValueError(f"expected {self.in_features} input features, got {a.shape[-1]}")
        flat = a.reshape(-1, self.in_features).T.contiguous()
        product: Tensor = _Product.apply(flat, self.weight, self)
        return (product.T + self.bias).reshape(*a.shape[:-1], self.out_features)

    def transposed_product(self, weight: Tensor, grad: Tensor) -> Tensor:
        """``[units, N] → [in, N]``: the product with the transposed sparse matrix."""
        values = weight.flatten()[self.order]
        return F.embedding_bag(
            self.units, grad, self.offsets, per_sample_weights=values, mode="sum"
        )

    def connection_products(self, x: Tensor, grad: Tensor) -> Tensor:
        """One dot product over the batch for each connection, ``[units, fan_in]``.

        It is the derivative of ``embedding_bag`` by its weights, which needs no gathered ``[units, fan_in, N]`` tensor.
        """
        with torch.enable_grad():
            weight = torch.zeros_like(self.weight, dtype=x.dtype, requires_grad=True)
            product = F.embedding_bag(self.index, x, per_sample_weights=weight, mode="sum")
            return torch.autograd.grad(product, weight, grad)[0]

    def dense_weight(self) -> Tensor:
        """The weight as a dense matrix, zeros included, for checks on small layers."""
        dense = self.weight.new_zeros(self.out_features, self.in_features)
        return dense.scatter(1, self.index, self.weight)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, fan_in={self.fan_in}"


@qd.register_layer(SparseLinear)
class SparseAdapter(qd.Adapter):
    """Moments on the connections alone: ``m0i`` and ``mii`` have the weight's shape ``[units, fan_in]``."""

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        assert isinstance(module, SparseLinear)
        x = a.flatten(0, -2).T.contiguous()
        return module.connection_products(x, g.flatten(0, -2).T.contiguous())
