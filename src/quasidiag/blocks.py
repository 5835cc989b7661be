"""The units of one layer: which parameters form their blocks, and the metric that is kept for them.

The metric lives in the optimizer's own state: ``state[bias]["m00"]``, ``state[weight]["m0i"]`` and
``state[weight]["mii"]``, each in its parameter's shape. They are the moments of ``a - shift``, with the activity ``a`` and
``state[weight]["shift"]``. There is one class for each reduction, the unitwise one in :mod:`quasidiag.unitwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quasidiag import kernels, reductions
from quasidiag import root as roots
from quasidiag.kernels.rule import Rule
from quasidiag.layers import Adapter
from quasidiag.layers.base import in_dtype_of, known_adapter
from quasidiag.layers.linear import LinearAdapter
from quasidiag.moments import Moments, recentre, smallest, with_precision
from quasidiag.sharing import Samples

State = Mapping[Tensor, dict[str, Any]]
Tensors = Sequence[Tensor]

#: Every this many metric updates, the shift moves to the mean activity and moments too small to matter become zero.
TIDY_EVERY = 64
#: The curvature of the weight decay counts for so many times a layer's mean moment at most.
MOST = 1e5


class Update(NamedTuple):
    """What a minibatch adds to the metric: the arguments of :meth:`DiagonalBlock.accumulate_`, but for the state."""

    module: nn.Module
    a: Tensor
    w: Any
    keep: float
    gain: float | Tensor


class DiagonalBlock:
    """The diagonal reduction: keeps ``m00`` and ``mii``. Quasi-diagonal layers without a trained bias use it as well."""

    #: Bounds relative to the unit's and the layer's mean (``reductions.safeguarded``), or ``None`` for no bounds.
    safeguard: tuple[float, float, float] | None = None
    #: The weight decay of each parameter if it is part of the loss (:mod:`quasidiag.auto.penalty`), else empty.
    decays: tuple[float, ...] = ()

    def __init__(
        self,
        name: str,
        module: nn.Module,
        adapter: Adapter,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
    ) -> None:
        self.name, self.module, self.adapter = name, module, adapter
        self.weight, self.bias = weight, bias
        #: Bias first, as in the paper.
        self.parameters = [p for p in (bias, weight) if p is not None]
        #: The parameter whose state counts the updates, and whose param group sets gamma and eps.
        self.home = self.parameters[-1]
        #: Turns a sum over this rank's units into one over all ranks' units (:mod:`quasidiag.sharding`).
        self.add_up: Callable[[Tensor], Tensor] = torch.positive

    def start(self, state: State, a: Tensor, dtype: torch.dtype, identity: bool) -> None:
        """Create the metric in ``state``: zeros, or the identity matrix if ``identity``."""
        state[self.home]["updates"] = 0
        for parameter, key in ((self.bias, "m00"), (self.weight, "mii")):
            if parameter is not None:
                full = torch.full_like(parameter, float(identity), dtype=dtype)
                state[parameter][key] = full.detach()

    def kept(self, state: State) -> Moments:
        """The moments as stored, of ``a - shift``."""
        weight = {} if self.weight is None else state[self.weight]
        bias = {} if self.bias is None else state[self.bias]
        return Moments(bias.get("m00"), weight.get("m0i"), weight.get("mii"))

    def moments(self, state: State) -> Moments:
        """The averages so far, of the activities ``a`` themselves."""
        return self.kept(state)

    def accumulate_(
        self,
        state: State,
        module: nn.Module,
        a: Tensor,
        w: Tensor,
        keep: float,
        gain: float | Tensor,
    ) -> None:
        """``M ← keep·M + gain·Σ w (1, a)(1, a)ᵀ``, in the entries that the reduction keeps."""
        adapter, into, shift = known_adapter(module), self.kept(state), self._shift(state)
        if (
            type(adapter) is LinearAdapter
            and isinstance(w, Tensor | kernels.Squares)
            and kernels.accumulate_(into, a.flatten(0, -2), w.flatten(0, -2), shift, keep, gain)
        ):
            return
        w, gain = in_precision(w, gain, next(m.dtype for m in into if m is not None))
        if isinstance(w, Samples) and shift is not None:
            w = w.minus(shift)
        a = in_dtype_of(w, a) if shift is None else in_dtype_of(w, a) - shift
        adapter.accumulate_(module, into, a, w, keep, gain)

    def _shift(self, state: State) -> Tensor | None:
        """The point that is subtracted from the activities, or ``None`` where there is none."""
        return None if self.weight is None else state[self.weight].get("shift")

    def finish_update(self, state: State) -> None:
        """Count the update and, every :data:`TIDY_EVERY` updates, tidy the moments."""
        state[self.home]["updates"] += 1
        if state[self.home]["updates"] % TIDY_EVERY == 0:
            self.tidy_(state)

    def tidy_(self, state: State) -> None:
        for moment in self.kept(state):
            if moment is not None:
                torch.hardshrink(moment, smallest(moment.dtype), out=moment)

    def solve(
        self, state: State, gradients: list[Tensor], eps: float, floor: float | None
    ) -> list[Tensor]:
        """The Riemannian gradient of each of :attr:`parameters`."""
        w = [torch.empty_like(v) for v in gradients]
        if self._fused(state, gradients, Rule(eps=eps, floor=eps if floor is None else floor), w=w):
            return w
        kept = self._bounded(self.kept(state))
        return [reductions.diagonal(m, v, eps=eps, floor=floor) for m, v in zip(kept, gradients)]

    @cached_property
    def kind(self) -> Hashable | None:
        """Blocks of equal ``kind`` can be solved together; a block whose kind is ``None`` is solved alone."""
        return (type(self),)

    @classmethod
    def solve_together(
        cls,
        blocks: Sequence[Any],
        state: State,
        gradients: Sequence[list[Tensor]],
        eps: float,
        floor: float | None,
    ) -> list[list[Tensor]]:
        """:meth:`solve` for blocks of one kind, concatenated."""
        kept = [m.flatten() for block in blocks for m in block._bounded(block.kept(state))]
        v = torch.cat([v.flatten() for pair in gradients for v in pair])
        w = reductions.diagonal(torch.cat(kept), v, eps=eps, floor=floor)
        parts = iter(w.split([len(m) for m in kept]))
        return [[next(parts).view_as(v) for v in pair] for pair in gradients]

    def solve_part(
        self, state: State, gradients: list[Tensor], eps: float, floor: float | None
    ) -> list[Tensor]:
        """As :meth:`solve` if some parameters have no gradient (frozen later): each by its diagonal alone."""
        kept = self._bounded(self.moments(state))
        return [reductions.diagonal(m, v, eps=eps, floor=floor) for m, v in zip(kept, gradients)]

    def _bounded(self, moments: Moments) -> list[Tensor]:
        """The diagonal as the solve uses it: ``m00`` and ``mii`` with the :attr:`safeguard` added."""
        kept = [m for m in (moments.m00, moments.mii) if m is not None]
        if self.safeguard is None:
            return kept
        unit, layer, dead = self.safeguard
        found = [m + dead * m.mean() for m in kept]
        if self.weight is None or self.weight.dim() == 1:
            return found
        # A lookup table's rows are bounded each by its own mean: those of rare tokens are small throughout.
        table = isinstance(self.module, nn.Embedding)
        rows = kept[-1] if table else self.adapter.rows(self.module, kept[-1])
        rows = rows + (unit * rows.mean(1, keepdim=True) + layer * rows.mean())
        found[-1] = rows if table else self.adapter.unrows(self.module, rows, kept[-1].shape)
        return found

    def _curvature(self, moments: Tensors) -> list[Tensor]:
        """The weight decay's curvature, one number for each of the ``moments``, but at most ``MOST`` times their mean.

        A layer below one that starts at zero would else go by the decay alone, as far as those that matter.
        """
        return [_within(decay, m) for m, decay in zip(moments, self.decays)]

    def decay(self, state: State) -> float:
        """The largest weight decay of the block's parameters, each with the bound of :meth:`_curvature`."""
        if not any(self.decays):
            return 0.0
        m00, _, mii = self.moments(state)
        found = [m for m in (m00, mii) if m is not None]
        return max(float(_within(decay, m)) for m, decay in zip(found, self.decays))

    @cached_property
    def plain(self) -> bool:
        """Whether this is the block of a dense layer that has a shift, with its weight stored as ``[units, inputs]``."""
        dense = self.weight is not None and self.weight.dim() == 2
        return dense and type(self.adapter) is LinearAdapter

    @cached_property
    def mixes(self) -> bool:
        """Whether all units see the same inputs, so that the gradient is one matrix, units by inputs."""
        return self.weight is not None and self.adapter.mixes(self.module)

    @cached_property
    def units(self) -> int:
        """The number of units; those of a lookup table are its columns."""
        return len(self.rows_of([p.detach() for p in self.parameters])[-1])

    @classmethod
    def root(cls, blocks: Sequence[Any], state: State) -> roots.Root:
        """The roots of the metrics of ``blocks``, layers of one shape, stacked (:mod:`quasidiag.root`)."""
        each = []
        for block in blocks:
            kept = block._bounded(block.kept(state))
            if any(block.decays):
                kept = [m + e for m, e in zip(kept, block._curvature(kept))]
            each.append(block.rows_of(kept))
        *m00, mii = map(stacked, zip(*each))
        return roots.diagonal(m00[0] if m00 else None, mii)

    @cached_property
    def alike(self) -> Hashable:
        """Layers whose ``alike`` is equal can be stacked (:mod:`quasidiag.auto.stacks`)."""
        rows = self.rows_of([p.detach() for p in self.parameters])
        form = type(self), self.mixes, self.adapter.shiftable, self.weight is None
        return *form, *(x.shape for x in rows)

    def rows_of(self, tensors: Tensors) -> list[Tensor]:
        """Tensors shaped like :attr:`parameters`, the weight's as ``[units, inputs]`` or a lone bias as ``[units, 1]``."""
        if self.plain:
            return [*tensors]
        if self.weight is None:
            return [tensors[0].reshape(-1, 1)]
        return [*(t.reshape(-1) for t in tensors[:-1]), self.adapter.rows(self.module, tensors[-1])]

    def like(self, rows: Tensors) -> list[Tensor]:
        """Back from :meth:`rows_of` to the parameters' own shapes."""
        if self.weight is None:
            return [rows[0].view_as(self.home)]
        weight = self.adapter.unrows(self.module, rows[-1], self.home.shape)
        return [*(r.view_as(p) for r, p in zip(rows[:-1], self.parameters)), weight]

    def descend_(self, state: State, gradients: list[Tensor], rule: Rule) -> bool:
        """Solve and step in one pass over memory; ``False``, with nothing done, where no kernel can."""
        buffers = [state[p]["momentum"] for p in self.parameters] if rule.momentum else None
        return self._fused(state, gradients, rule, buffers=buffers, thetas=self.parameters)

    def advance_(self, state: State, update: Update, gradients: list[Tensor], rule: Rule) -> bool:
        """:meth:`accumulate_`, :meth:`finish_update`, :meth:`descend_` in one call; ``False`` where no kernel can."""
        module, a, w, keep, gain = update
        tidied = (state[self.home]["updates"] + 1) % TIDY_EVERY == 0
        plain = self.kind is not None and type(known_adapter(module)) is LinearAdapter
        if tidied or not plain or self.safeguard or not isinstance(w, Tensor | kernels.Squares):
            return False
        a, w = a.flatten(0, -2), w.flatten(0, -2)
        into, shift, thetas = self.kept(state), self._shift(state), self.parameters
        done = kernels.advance_(into, a, w, shift, keep, gain, gradients, rule, thetas)
        if done:
            self.finish_update(state)
        return done

    def _fused(
        self, state: State, gradients: Tensors, rule: Rule, **outputs: Tensors | None
    ) -> bool:
        return kernels.diagonal(self._bounded(self.kept(state)), gradients, rule, **outputs)


class QuasiDiagonalBlock(DiagonalBlock):
    """The quasi-diagonal reduction: keeps ``m00``, ``m0i`` and ``mii``, with a shift where the layer allows one."""

    weight: nn.Parameter
    bias: nn.Parameter

    def start(self, state: State, a: Tensor, dtype: torch.dtype, identity: bool) -> None:
        super().start(state, a, dtype, identity)
        state[self.weight]["m0i"] = torch.zeros_like(self.weight, dtype=dtype).detach()
        if self.adapter.shiftable:
            state[self.weight]["shift"] = torch.zeros(a.shape[-1], dtype=dtype, device=a.device)
            rows = a.to(dtype).flatten(0, -2)  # none, if the layer was given no samples yet
            self._move(state, rows.sum(0) / max(1, len(rows)))

    def moments(self, state: State) -> Moments:
        kept, shift = self.kept(state), self._shift(state)
        return kept if shift is None else recentre(kept, -shift)

    def tidy_(self, state: State) -> None:
        m00, m0i, _ = self.kept(state)
        assert m00 is not None and m0i is not None
        if "shift" in state[self.weight]:
            total, first = self.add_up(m00.sum()), self.add_up(m0i.sum(0))
            self._move(state, torch.where(total > 0, first / total, 0.0))
        super().tidy_(state)

    def _move(self, state: State, move: Tensor) -> None:
        """Add ``move`` to the shift, and adapt the moments (``moments.recentre``, in place)."""
        m00, m0i, mii = self.kept(state)
        assert m00 is not None and m0i is not None and mii is not None
        column = m00.unsqueeze(-1)
        mii.sub_((2 * move) * m0i).addcmul_(move.square(), column)
        m0i.sub_(move * column)
        state[self.weight]["shift"].add_(move)

    def solve(
        self, state: State, gradients: list[Tensor], eps: float, floor: float | None
    ) -> list[Tensor]:
        w = [torch.empty_like(v) for v in gradients]
        if self._fused(state, gradients, Rule(eps=eps, floor=eps if floor is None else floor), w=w):
            return w
        v0, vi = self._rows(gradients)
        m00, m0i, mii = self._moment_rows(state)
        c = self._shift(state)
        w0, wi = reductions.quasi_diagonal(m00, m0i, mii, v0, vi, eps=eps, floor=floor, shift=c)
        return [w0.view_as(self.bias), self.adapter.unrows(self.module, wi, self.weight.shape)]

    @classmethod
    def root(cls, blocks: Sequence[Any], state: State) -> roots.Root:
        each = []
        for block in blocks:
            m00, m0i, mii = block._kept_rows(state)
            if any(block.decays):
                decay = block._curvature([m00, mii])
                m00, m0i, mii = with_precision(m00, m0i, mii, block._shift(state), *decay)
            each.append((m00, m0i, mii))
        m00, m0i, mii = map(stacked, zip(*each))
        shift = None
        if blocks[0].adapter.shiftable:
            shift = stacked([state[block.weight]["shift"] for block in blocks]).unsqueeze(1)
        return roots.quasi_diagonal(m00, m0i, mii, shift, blocks[0].safeguard)

    @cached_property
    def kind(self) -> Hashable | None:
        return (
            type(self),
            self.adapter.rows(self.module, self.weight).shape[1],
            self.adapter.shiftable,
        )

    @classmethod
    def solve_together(
        cls,
        blocks: Sequence[Any],
        state: State,
        gradients: Sequence[list[Tensor]],
        eps: float,
        floor: float | None,
    ) -> list[list[Tensor]]:
        """As one layer with the units of all blocks, each unit with the shift of its own layer."""
        moments = [block._moment_rows(state) for block in blocks]
        units = [len(m00) for m00, _, _ in moments]
        m00, m0i, mii = (torch.cat(parts) for parts in zip(*moments))
        pairs = [block._rows(pair) for block, pair in zip(blocks, gradients)]
        v0, vi = (torch.cat(parts) for parts in zip(*pairs))
        shift = None
        if blocks[0].adapter.shiftable:
            shifts = [state[block.weight]["shift"].expand(n, -1) for block, n in zip(blocks, units)]
            shift = torch.cat(shifts)
        w0, wi = reductions.quasi_diagonal(m00, m0i, mii, v0, vi, eps=eps, floor=floor, shift=shift)
        return [
            [w0.view_as(block.bias), block.adapter.unrows(block.module, wi, block.weight.shape)]
            for block, w0, wi in zip(blocks, w0.split(units), wi.split(units))
        ]

    def _fused(
        self, state: State, gradients: Tensors, rule: Rule, **outputs: Tensors | None
    ) -> bool:
        rows = {name: pair and self._rows(pair) for name, pair in outputs.items()}
        for name, pair in outputs.items():
            if pair and rows[name][1].data_ptr() != pair[1].data_ptr():  # type: ignore[index]
                return False  # not a view: a kernel would write into a copy
        m00, m0i, mii = self._moment_rows(state)
        v0, vi = self._rows(gradients)
        return kernels.quasi_diagonal(m00, m0i, mii, v0, vi, self._shift(state), rule, **rows)

    def _kept_rows(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """The stored moments (:meth:`kept`), with those of the weight as ``[units, inputs]``."""
        m00, m0i, mii = self.kept(state)
        assert m00 is not None and m0i is not None and mii is not None
        if self.plain:
            return m00, m0i, mii
        rows = self.adapter.rows
        return m00.reshape(-1), rows(self.module, m0i), rows(self.module, mii)

    def _moment_rows(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_kept_rows` as the solve uses them: with the :attr:`safeguard` added."""
        m00, m0i, mii = self._kept_rows(state)
        m00, mii = _safeguarded(self.safeguard, m00, m0i, mii)
        return m00, m0i, mii

    def _rows(self, pair: Tensors) -> tuple[Tensor, Tensor]:
        """A bias and a weight (or two tensors of their shapes), the weight as ``[units, inputs]``."""
        if self.plain:
            return pair[0], pair[1]
        return pair[0].reshape(-1), self.adapter.rows(self.module, pair[1])


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors stacked along a new first dimension; a single one is not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack([*tensors])


def _safeguarded(
    bounds: tuple[float, float, float] | None, m00: Tensor, m0i: Tensor, mii: Tensor
) -> tuple[Tensor, Tensor]:
    return (m00, mii) if bounds is None else reductions.safeguarded(m00, m0i, mii, *bounds)


def in_precision(w: Tensor, gain: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """``w`` in the metric's precision, and the gain as a number: a gain on the device is multiplied into ``w``."""
    w = w.to(dtype)
    return (w * gain, 1.0) if isinstance(gain, Tensor) else (w, gain)


def _within(decay: float, moments: Tensor) -> Tensor:
    """A weight decay, but at most ``MOST`` times the mean of these moments."""
    return (MOST * moments.mean()).clamp(0.0, decay)
