r"""Layers of one shape, stacked into one tensor, so that a step computes them all at once.

A network of many layers has few shapes, and on a device calls cost as much time as numbers. So the numbers of layers of
one shape go into one tensor, ``[layers, units, inputs]``, and each call is made once for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quasidiag.blocks import DiagonalBlock, State, stacked
from quasidiag.moments import cast
from quasidiag.root import Root
from quasidiag.sums import dtype_of
from quasidiag.unitwise import UnitwiseBlock

#: Larger layers stay alone unless ``foreach`` is ``True``: copying them would take longer than calls of their own.
LARGEST = {"cpu": 2**14, "cuda": 2**22}


class KeptRoot(NamedTuple):
    """The root of a stack's metric, also for ``each`` layer, and what tells whether the metric has changed since."""

    root: Root
    each: list[tuple[DiagonalBlock, Root]]
    homes: list[Any]
    moments: list[Tensor]
    versions: list[int]

    def holds(self, homes: list[Any]) -> bool:
        """Whether the metric is still the one that this is the root of."""
        return homes == self.homes and [m._version for m in self.moments] == self.versions


class Stack:
    """Layers of one shape, whose metric has a root (:mod:`quasidiag.root`)."""

    def __init__(self, blocks: Sequence[DiagonalBlock]) -> None:
        self.blocks = blocks
        self._root: KeptRoot | None = None

    @property
    def mixes(self) -> bool:
        """Whether the layers' gradients are matrices: all units see the same inputs."""
        return self.blocks[0].mixes

    def rows(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Stack tensors shaped like each layer's parameters, the bias first: ``[layers, units(, inputs)]`` each."""
        each = [block.rows_of(layer) for block, layer in zip(self.blocks, tensors)]
        return [stacked(parts) for parts in zip(*each)]

    def like(self, rows: Sequence[Tensor]) -> list[list[Tensor]]:
        """Back from :meth:`rows`, layer by layer."""
        return [block.like([x[i] for x in rows]) for i, block in enumerate(self.blocks)]

    def root(self, state: State) -> Root:
        """The coordinates in which the metric is the identity matrix."""
        return self._known(state).root

    def roots_of(self, state: State) -> list[tuple[DiagonalBlock, Root]]:
        """The roots of the layers, one by one."""
        return self._known(state).each

    def _known(self, state: State) -> KeptRoot:
        """The root, computed anew only if the metric has changed."""
        homes = [_home(block, state[block.home]) for block in self.blocks]
        kept = self._root
        if kept is None or not kept.holds(homes):
            every = [(*block.kept(state), block._shift(state)) for block in self.blocks]
            moments = [m for of_one in every for m in of_one if m is not None]
            root = self.blocks[0].root(self.blocks, state)
            each = [(block, root.of(i)) for i, block in enumerate(self.blocks)]
            versions = [m._version for m in moments]
            kept = self._root = KeptRoot(root, each, homes, moments, versions)
        return kept

    def forms(self, state: State, steps: Sequence[Sequence[Sequence[Tensor]]]) -> Tensor:
        r"""The products :math:`w^⊤ M w'` of all pairs of steps in the metric, layer by layer: ``[layers, steps, steps]``."""
        root = self.root(state)
        if len(steps) == 1:
            return root.lengths(self.rows(steps[0])).sum(-1).view(-1, 1, 1)
        us = [root.coordinates(self.rows(step)).flatten(1) for step in steps]
        return torch.stack([torch.stack([_dots(u, v) for v in us], 1) for u in us], 1)

    def strengths(self, state: State) -> Tensor:
        r""":math:`ρ^2` of each layer, the mean over units of :math:`\sum_i σ_i^2 w_i^2`; 0 if there are no weights."""
        if self.blocks[0].weight is None:
            return torch.zeros(len(self.blocks), device=self.blocks[0].home.device)
        root = Root(None, None, self.root(state).scale)
        weights = [[cast(p.detach(), root.scale.dtype) for p in b.parameters] for b in self.blocks]
        return root.lengths(self.rows(weights)[-1:]).mean(-1)


class Alone(Stack):
    """A layer with the unitwise reduction: its units have full blocks, and no root."""

    blocks: Sequence[UnitwiseBlock]

    def forms(self, state: State, steps: Sequence[Sequence[Sequence[Tensor]]]) -> Tensor:
        return self.blocks[0].forms(state, [step[0] for step in steps]).unsqueeze(0)

    def strengths(self, state: State) -> Tensor:
        return self.blocks[0].strength(state).unsqueeze(0)


class Stacks:
    """The stacks of an optimizer's layers, kept from step to step together with their roots."""

    def __init__(self) -> None:
        self._kept: dict[tuple[DiagonalBlock, ...], Stack] = {}
        #: What :meth:`of` was asked for in this step, and in the one before it.
        self._asked: dict[Hashable, list[Stack]] = {}
        self._before: dict[Hashable, list[Stack]] = {}

    def of(
        self, blocks: Iterable[DiagonalBlock], state: State, foreach: bool | None = None
    ) -> list[Stack]:
        """These layers in stacks, alike ones together; ``foreach=False`` leaves each alone, ``None`` the large ones."""
        blocks = tuple(blocks)
        asked = blocks, foreach, *(block.home.device for block in blocks)
        found = self._asked.get(asked) or self._before.get(asked)
        if found is None:
            alike: dict[Hashable, list[DiagonalBlock]] = {}
            for block in blocks:
                alike.setdefault(_key(block, state, foreach), []).append(block)
            found = [self._stack(tuple(group)) for group in alike.values()]
        self._asked[asked] = found
        return found

    def _stack(self, blocks: tuple[DiagonalBlock, ...]) -> Stack:
        if blocks not in self._kept:
            alone = isinstance(blocks[0], UnitwiseBlock)
            self._kept[blocks] = Alone(blocks) if alone else Stack(blocks)
        return self._kept[blocks]

    def sweep(self) -> None:
        """After a step, drop the stacks that it did not use: if the layers that move have changed, so have the stacks."""
        if self._asked:
            used = [stack for found in self._asked.values() for stack in found]
            self._kept = {tuple(stack.blocks): stack for stack in used}
            self._before, self._asked = self._asked, {}


def _home(block: DiagonalBlock, kept: dict[str, Any]) -> tuple[int, int, tuple[float, ...]]:
    """A key that changes when a layer's metric is updated or replaced, or its weight decay is."""
    return kept["updates"], id(kept.get("mii", kept.get("m00"))), block.decays


def _key(block: DiagonalBlock, state: State, foreach: bool | None) -> Hashable:
    """Layers of equal keys go into one stack; a layer that stays alone is its own key."""
    home = block.home
    large = foreach is None and home.numel() > LARGEST.get(home.device.type, 0)
    if foreach is False or large or isinstance(block, UnitwiseBlock):
        return block
    return block.alike, block.safeguard, dtype_of(block, state), home.device


def in_order(
    blocks: Sequence[DiagonalBlock], stacks: Sequence[Stack], numbers: Sequence[Tensor]
) -> Tensor:
    """Numbers found stack by stack, in the order of ``blocks``: in float64 on the CPU, by one copy from the device."""
    found = torch.cat([x.to(numbers[0].device) for x in numbers]).double().cpu()
    of = {block: i for i, block in enumerate(block for stack in stacks for block in stack.blocks)}
    return found[[of[block] for block in blocks]]


def _dots(u: Tensor, v: Tensor) -> Tensor:
    """The product of each row of ``u`` with that of ``v``; elementwise, as matrix products are slow at single rows."""
    return torch.linalg.vector_norm(u, dim=1).square() if u is v else (u * v).sum(1)
