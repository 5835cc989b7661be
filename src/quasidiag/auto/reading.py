"""Finds the tensor that a criterion was called on among the outputs of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Size, Tensor


class Reading(NamedTuple):
    """How the criterion's output follows from the model's outputs: it is output ``number``, or a view or copy of it.

    For a view, ``strides`` has its strides and its offset in the memory of that output, whose own strides are ``layout``:
    in a replay another kernel may lay the output out differently. For a copy ``strides`` is ``None``: it has the output's
    elements in the same order, or, with ``channels_last``, after the second dimension was moved to the end. It may be a copy
    of a slice, (dimension, start, length), such as all positions of a sequence but the last.
    """

    number: int
    shape: Size
    strides: tuple[tuple[int, ...], int] | None
    layout: tuple[int, ...] = ()
    channels_last: bool = False
    slice: tuple[int, int, int] | None = None

    @staticmethod
    def find(
        output: Tensor, candidates: Sequence[Tensor], versions: Sequence[int]
    ) -> Reading | None:
        """How ``output`` follows from one of the candidates, or ``None``.

        Candidates that were written to since their ``versions`` were taken are left out.
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
        for number, y in numbered:
            for part in _slices(y.shape, output.numel()):
                copy = Reading(number, output.shape, None, slice=part)
                if torch.equal(copy.of(candidates).to(output.dtype), output):
                    return copy
        return None

    def of(self, outputs: Sequence[Tensor], share: float = 1.0) -> Tensor:
        """The criterion's output for other ``outputs`` of the model, which hold a ``share`` of the samples."""
        y = outputs[self.number]
        rows = round(self.shape[0] * share)
        if self.strides is not None:
            strides, offset = self.strides
            if y.stride() != self.layout:
                room = torch.empty_strided(y.shape, self.layout, dtype=y.dtype, device=y.device)
                y = room.copy_(y)
            return y.as_strided((rows, *self.shape[1:]), strides, y.storage_offset() + offset)
        y = y.movedim(1, -1) if self.channels_last else y
        y = y if self.slice is None else y.narrow(*self.slice)
        return y.reshape(rows, *self.shape[1:])


def _slices(shape: Size, numbers: int) -> Iterator[tuple[int, int, int]]:
    """Slices of so many numbers at the start or the end of a dimension, not of the samples: (dimension, start, length)."""
    for dimension, size in enumerate(shape[1:], 1):
        length, rest = divmod(numbers * size, max(1, shape.numel()))
        if not rest and 0 < length < size:
            yield dimension, 0, length
            yield dimension, size - length, length
