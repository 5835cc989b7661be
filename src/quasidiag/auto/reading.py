"""What a criterion was called on, found again in what the model returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Size, Tensor


class Reading(NamedTuple):
    """The criterion's output as a function of the model's outputs: one of them, or a view or a copy of it.

    ``strides`` is the place of a view in its tensor's memory, strides and offset, for a tensor of strides ``layout``:
    another kernel may lay it out otherwise. A copy has none; it keeps the order of the elements, or brings the second
    dimension (channels) to the end first.
    """

    number: int
    shape: Size
    strides: tuple[tuple[int, ...], int] | None
    layout: tuple[int, ...] = ()
    channels_last: bool = False

    @staticmethod
    def find(
        output: Tensor, candidates: Sequence[Tensor], versions: Sequence[int]
    ) -> Reading | None:
        """How ``output`` can be read off one of the candidates, or ``None``.

        A candidate that has been written to since it had its ``version`` is none.
        """
        memory = output.untyped_storage().data_ptr()
        numbered = [(i, y) for i, y in enumerate(candidates) if y._version == versions[i]]
        for number, y in sorted(numbered, key=lambda pair: pair[1].data_ptr() != output.data_ptr()):
            if y.untyped_storage().data_ptr() == memory:
                offset = int(output.storage_offset()) - int(y.storage_offset())
                return Reading(number, output.shape, (output.stride(), offset), y.stride())
        for number, y in numbered:
            for channels_last in (False, True):
                copy = Reading(number, output.shape, None, channels_last=channels_last)
                fits = y.numel() == output.numel() and y.dim() > 2 * channels_last
                if fits and torch.equal(copy.of(candidates).to(output.dtype), output):
                    return copy
        return None

    def of(self, outputs: Sequence[Tensor], share: float = 1.0) -> Tensor:
        """The same of other outputs, of the first ``share`` of the samples."""
        y = outputs[self.number]
        rows = round(self.shape[0] * share)
        if self.strides is not None:
            strides, offset = self.strides
            if y.stride() != self.layout:
                room = torch.empty_strided(y.shape, self.layout, dtype=y.dtype, device=y.device)
                y = room.copy_(y)
            return y.as_strided((rows, *self.shape[1:]), strides, y.storage_offset() + offset)
        y = y.movedim(1, -1) if self.channels_last else y
        return y.reshape(rows, *self.shape[1:])
