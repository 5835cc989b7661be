"""One call of the model, its arguments and its outputs, recorded so that it can be run again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quasidiag.auto.reading import Reading
from quasidiag.layers.composite import Surroundings
from quasidiag.probe import names, tensors


@dataclass(eq=False)
class Call:
    """One call of the model: arguments, random state and autocast (``around``), outputs.

    ``versions`` are the version counters of the outputs, ``entered`` those of the arguments when the model was called.
    """

    arguments: tuple[Any, Any]
    around: Surroundings
    outputs: list[Tensor]
    versions: list[int]
    entered: list[int]

    def reading(self, output: Tensor) -> Reading | None:
        """How the tensor that a criterion was called on follows from the outputs of this call; ``None`` if it does not."""
        return Reading.find(output, self.outputs, self.versions)

    def part(self, share: float) -> Part | None:
        """The samples that make up ``share``; ``None`` for all of them, or if the arguments' first dimensions differ."""
        if share == 1:
            return None
        lengths = {len(x) for x in tensors(self.arguments) if x.dim()}
        if len(lengths) != 1:
            return None
        samples = lengths.pop()
        kept = max(1, math.ceil(share * samples))
        return Part(kept, samples) if kept < samples else None


class Part(NamedTuple):
    """``kept`` of the ``samples``, at even distances because the samples may be sorted."""

    kept: int
    samples: int

    @property
    def share(self) -> float:
        """The share that these are, in whole samples: at least the one that was asked for."""
        return self.kept / self.samples

    def of(self, tree: Any) -> Any:
        """The arguments ``tree``, with this part of each tensor whose first dimension is the samples."""
        return changed(tree, lambda x: self.rows(x) if x.dim() and len(x) == self.samples else x)

    def rows(self, x: Tensor) -> Tensor:
        """This part of the rows of ``x``, which has the same number of rows for every sample."""
        of_each = x.unflatten(0, (self.samples, -1))
        step, rest = divmod(self.samples, self.kept)
        if rest:
            picked = torch.arange(self.kept, device=x.device) * self.samples // self.kept
            return of_each[picked].flatten(0, 1)
        return of_each[::step].contiguous().flatten(0, 1)  # models may need that, or write into it


def changed(
    tree: Any, change: Callable[[Tensor], Tensor], copies: Mapping[int, Any] = MappingProxyType({})
) -> Any:
    """A copy of ``tree`` with ``change`` applied to its tensors; only plain containers and dataclasses are copied.

    ``copies`` maps the ids of the containers around ``tree`` to their copies, because it may refer back to them.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(changed(branch, change, copies) for branch in tree)
    if (
        isinstance(tree, tuple)
        and hasattr(tree, "_fields")
        and not isinstance(tree, PackedSequence)
    ):
        return type(tree)(*(changed(branch, change, copies) for branch in tree))
    if id(tree) in copies or not (isinstance(tree, dict) or names(tree)):
        return copies.get(id(tree), tree)
    new = copy.copy(tree)
    copies = {**copies, id(tree): new}
    for key in tree if isinstance(tree, dict) else ():
        new[key] = changed(tree[key], change, copies)
    for name in names(tree):  # the dataclass may be frozen
        object.__setattr__(new, name, changed(getattr(tree, name), change, copies))
    return new


def versions(tree: Any) -> list[int]:
    """The version counter of each tensor, how often it was written to; -1 for inference tensors, which have none."""
    return [-1 if x.is_inference() else x._version for x in tensors(tree)]
