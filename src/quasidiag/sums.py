r"""The moments of a minibatch whose gradients are accumulated over several backward passes.

Activities are kept for the last pass only. The moments of the passes before it are summed up here, in the shape of the
metric, until the step takes them into the moving average.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quasidiag.blocks import DiagonalBlock, State

#: The entries of a block's state that are sums over samples.
SUMS = ("m00", "m0i", "mii", "block")


def dtype_of(block: DiagonalBlock, state: State | None = None) -> torch.dtype:
    """The dtype of the block's metric in ``state``, or of a new one: its parameters' dtype, but at least float32."""
    kept = {} if state is None else state.get(block.home, {})
    found = next((kept[key].dtype for key in SUMS if key in kept), None)
    return found or torch.promote_types(block.home.dtype, torch.float32)


class Sums:
    """Sums of a minibatch's moments, block by block."""

    def __init__(self) -> None:
        self._rooms: dict[DiagonalBlock, dict[Tensor, dict[str, Any]]] = {}

    def add(
        self, state: State, block: DiagonalBlock, module: nn.Module, a: Tensor, w: Tensor
    ) -> None:
        """Add the moments of a layer's activity, with the shift of the metric in ``state`` if there is one."""
        room = self._rooms.get(block)
        if room is None:
            room = self._rooms[block] = {p: {} for p in block.parameters}
            block.start(room, a, dtype_of(block), identity=False)
            for p in block.parameters:
                if "shift" in room[p] and "shift" in state.get(p, {}):
                    room[p]["shift"] = state[p]["shift"]
        block.accumulate_(room, module, a, w.to(dtype_of(block)), 1.0, 1.0)

    def __iter__(self) -> Iterator[DiagonalBlock]:
        return iter(self._rooms)

    def __len__(self) -> int:
        return len(self._rooms)

    def tensors(self) -> list[Tensor]:
        """The sums of all blocks, as a list."""
        return [
            kept[key]
            for room in self._rooms.values()
            for kept in room.values()
            for key in SUMS
            if key in kept
        ]

    def centre(self, block: DiagonalBlock) -> Tensor:
        """The shift of the sums, as one activity ``[1, inputs]``; ``[1, 0]`` if there is none."""
        shifts = [kept["shift"] for kept in self._rooms[block].values() if "shift" in kept]
        return shifts[0].unsqueeze(0) if shifts else torch.empty(1, 0, device=block.home.device)

    def merge_(self, state: State, block: DiagonalBlock, keep: float, gain: float | Tensor) -> None:
        """``M ← keep·M + gain·Σ`` with the sums ``Σ``, which are overwritten."""
        for parameter, kept in self._rooms[block].items():
            for key in SUMS:
                if key in kept:
                    state[parameter][key].mul_(keep).add_(kept[key].mul_(gain))

    def clear(self) -> None:
        """Drop all sums."""
        self._rooms.clear()
