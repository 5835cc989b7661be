r"""Weight sharing: how a layer that is applied at several positions (time, space) of one sample enters the metric.

With the activity :math:`a_s` and the derivative :math:`δ_s` at position *s* of a sample, the sample's contribution to
the metric of a unit (bias first, :math:`\tilde a = (1, a)`) is

===========  ==============================================================  ==========================================
``expand``   :math:`\sum_s δ_s^2\, \tilde a_s \tilde a_s^⊤`                    each position is one more occurrence
``exact``    :math:`g g^⊤` with :math:`g = \sum_s δ_s \tilde a_s`              the gradient of the sample itself
``reduce``   :math:`d^2\, \tilde b \tilde b^⊤`, :math:`d = \sum_s δ_s`,        as if the sample had one position,
             :math:`b = \frac1S \sum_s a_s`                                    which holds the average activity
===========  ==============================================================  ==========================================

``recurrent`` is ``exact`` in recurrent layers and ``expand`` in all others. A recurrent layer's derivatives at successive
positions are much alike, so that they add up: ``expand`` would have its metric too small by up to the number of positions,
and its steps too long beside those of other layers. All calls of a pass on equally many sequences are taken for calls on the
same ones, as those of a cell in a loop are.

With one position all are the same. ``expand`` is the cheapest, the layer's own gradient kernel twice. ``exact``
forms gradients of single samples, a few at a time: never more than :data:`BUDGET` numbers at once, or one sample's if
those are more. It sums over every call of a layer in a pass, so that a layer that is used twice, or two that share a
weight, count as one; until the step it keeps the derivatives themselves, once for every vector of the metric.
``reduce`` treats each call separately.

What the last two record is not the activity of the layer itself, so it is filed under a *view* of the layer: a module
without parameters whose adapter can read such records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quasidiag.layers.base import Adapter, in_dtype_of, known_adapter, register_layer
from quasidiag.layers.composite import Call
from quasidiag.layers.embedding import EmbeddingAdapter
from quasidiag.moments import Moments

SHARINGS = ("expand", "exact", "reduce", "recurrent")

#: Numbers in memory at once, for the gradients of single samples and what they are made from: 64 MiB in float32.
BUDGET = 2**24


class View(nn.Module):
    """Stands for a layer (or several that share parameters) in records of something else than its activity."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self._of = (of,)  # in a tuple, so as not to become a submodule

    @property
    def of(self) -> nn.Module:
        return self._of[0]


class ReducedView(View):
    """A layer with one position for each sample: activities ``[N, G, I]``, weights ``[N, G, U]``."""


class BiasView(View):
    """A layer's bias alone."""


class SampleView(View):
    """The gradients of single samples, for all layers that feed a block."""


@register_layer(BiasView)
class BiasAdapter(Adapter):
    """Updates ``m00`` as the layer's own adapter does, and nothing else."""

    def accumulate_(
        self, module: nn.Module, into: Moments, a: Tensor, w: Tensor, keep: float, gain: float
    ) -> None:
        assert isinstance(module, View)
        known_adapter(module.of).accumulate_(
            module.of, Moments(into.m00, None, None), a, w, keep, gain
        )


# ------------------------------------------------------------------------------------------------ reduce


def reduced(module: nn.Module, a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Mean activity ``[N, G, I]`` and summed derivative ``[N, G, U]`` of every sample."""
    adapter = known_adapter(module)
    if isinstance(adapter, EmbeddingAdapter):
        return _token_shares(module, a, delta)
    found = []
    for part in _slices(len(a), _size(module, a, delta)):
        p, d = adapter.patches(module, in_dtype_of(delta, a[part]), delta[part])
        found.append((p.mean(1), d.sum(1)))
    return torch.cat([p for p, _ in found]), torch.cat([d for _, d in found])


def reducible(adapter: Adapter) -> bool:
    """Whether :func:`reduced` can handle the layer."""
    return adapter.has_patches or isinstance(adapter, EmbeddingAdapter)


def _token_shares(module: Any, tokens: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    n, units = len(tokens), delta.shape[-1]
    tokens, delta = tokens.reshape(n, -1), delta.reshape(n, -1, units)
    share = delta.new_full(tokens.shape, 1 / tokens.shape[1])
    if module.padding_idx is not None:
        share = torch.where(tokens == module.padding_idx, 0.0, share)
    table = delta.new_zeros(n, module.num_embeddings).scatter_add_(1, tokens, share)
    return table.unsqueeze(1), delta.sum(1).unsqueeze(1)


@register_layer(ReducedView)
class ReducedAdapter(Adapter):
    """Treats every group of units as a dense layer."""

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        assert isinstance(module, View)
        adapter = known_adapter(module.of)
        rows = torch.einsum("ngu,ngi->gui", g, a).flatten(0, 1)
        return adapter.unrows(module.of, rows, getattr(module.of, adapter.weight).shape)

    def bias_grad(self, module: nn.Module, g: Tensor) -> Tensor:
        assert isinstance(module, View)
        return g.sum(0).reshape(getattr(module.of, known_adapter(module.of).bias or "").shape)

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return a.unsqueeze(1), g.unsqueeze(1)


# ------------------------------------------------------------------------------------------------- exact


class Samples:
    """The calls that make up the samples' gradients; it takes the place of the weights ``w`` in a record."""

    def __init__(self, calls: list[Call], gain: float | Tensor = 1.0) -> None:
        self.calls, self.gain = calls, gain

    @property
    def dtype(self) -> torch.dtype:
        return self.calls[0].delta.dtype

    def to(self, dtype: torch.dtype) -> Samples:
        return Samples([c._replace(delta=c.delta.to(dtype)) for c in self.calls], self.gain)

    def minus(self, shift: Tensor) -> Samples:
        """The same calls, of dense layers, with their activities measured from ``shift``."""
        moved = [c._replace(a=in_dtype_of(c.delta, c.a) - shift) for c in self.calls]
        return Samples(moved, self.gain)

    def sum(self) -> Tensor:
        """A sum of all squared derivatives: not finite if one of them is not."""
        return torch.stack([c.delta.square().sum() for c in self.calls]).sum()

    def __mul__(self, factor: float | Tensor) -> Samples:
        return Samples(self.calls, self.gain * factor)

    def parts(self) -> Iterator[list[Call]]:
        """The calls, cut into a few samples at a time so that their gradients fit the :data:`BUDGET`."""
        sizes = {len(call.a) for call in self.calls}
        if len(sizes) > 1:
            name = type(self.calls[0].module).__name__
            raise ValueError(
                f"a {name} was called on batches of {sorted(sizes)} samples in one pass: sharing='exact' cannot tell "
                "which belong together; use sharing='expand'"
            )
        size = sum(_size(*call) for call in self.calls)
        for part in _slices(sizes.pop(), size):
            yield [
                Call(c.module, in_dtype_of(c.delta, c.a[part]), c.delta[part]) for c in self.calls
            ]


@register_layer(SampleView)
class SampleAdapter(Adapter):
    r"""``M ← keep·M + gain·Σ g gᵀ`` over the samples' gradients :math:`g`, each summed over all its calls."""

    def accumulate_(
        self, module: nn.Module, into: Moments, a: Tensor, w: Any, keep: float, gain: float
    ) -> None:
        assert isinstance(module, View) and isinstance(w, Samples)
        layer, adapter = module.of, known_adapter(module.of)
        for kept in into:
            if kept is not None:
                kept.mul_(keep)
        for calls in w.parts():
            g0, gi = gradients(layer, calls, into.m00 is not None, into.mii is not None)
            if into.m00 is not None and g0 is not None:
                total = g0.square().sum(0) * w.gain
                into.m00.add_(total.view_as(into.m00), alpha=gain)
            if into.mii is not None and gi is not None:
                total = gi.square().sum(0) * w.gain
                into.mii.add_(adapter.unrows(layer, total, into.mii.shape), alpha=gain)
            if into.m0i is not None and g0 is not None and gi is not None:
                total = torch.einsum("nu,nui->ui", g0, gi) * w.gain
                into.m0i.add_(adapter.unrows(layer, total, into.m0i.shape), alpha=gain)

    def full_block(self, module: nn.Module, a: Tensor, w: Any, bias: bool) -> Tensor:
        assert isinstance(module, View) and isinstance(w, Samples)
        total: Tensor | None = None
        for calls in w.parts():
            g0, g = gradients(module.of, calls, bias, True)
            assert g is not None
            if g0 is not None:
                g = torch.cat([g0.unsqueeze(-1), g], dim=-1)
            block = torch.einsum("nui,nuj->uij", g, g) * w.gain
            total = block if total is None else total + block
        assert total is not None
        return total


def gradients(
    layer: nn.Module, calls: list[Call], bias: bool, weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Each sample's gradients of bias and weight, ``[n, units]`` and ``[n, units, inputs]``, in the rows of ``layer``."""
    target = known_adapter(layer)
    g0: list[Tensor] = []
    gi: list[Tensor] = []
    for module, a, delta in calls:
        adapter = known_adapter(module)
        if adapter.has_patches:
            p, d = adapter.patches(module, a, delta)
            if bias:
                g0.append(d.sum(1).flatten(1))
            if weight:
                rows = torch.einsum("nsgu,nsgi->ngui", d, p).flatten(1, 2)
                if type(adapter) is not type(target):  # a tie between layers of different kinds
                    shape = getattr(module, adapter.weight).shape
                    own = [adapter.unrows(module, r, shape) for r in rows]
                    rows = torch.stack([target.rows(layer, g) for g in own])
                gi.append(rows)
            continue
        samples = [(a[n : n + 1], delta[n : n + 1]) for n in range(len(a))]
        if bias:
            g0.append(torch.stack([adapter.bias_grad(module, d).flatten() for _, d in samples]))
        if weight:
            own = [adapter.weight_grad(module, x, d) for x, d in samples]
            gi.append(torch.stack([target.rows(layer, g) for g in own]))
    return (sum(g0[1:], g0[0]) if g0 else None), (sum(gi[1:], gi[0]) if gi else None)


# ------------------------------------------------------------------------------------------ bounded memory


def _slices(n: int, size: int) -> Iterator[slice]:
    step = max(1, BUDGET // max(1, size))
    return (slice(i, i + step) for i in range(0, n, step))


def _size(module: nn.Module, a: Tensor, delta: Tensor) -> int:
    """How many numbers one sample's gradient takes in memory, with the patches that it is made from."""
    adapter = known_adapter(module)
    weight = getattr(module, adapter.weight).numel() if adapter.weight else 0
    if not adapter.has_patches:
        return 2 * weight
    p, _ = adapter.patches(module, in_dtype_of(delta, a[:1]), delta[:1])
    return p.numel() + 3 * weight
