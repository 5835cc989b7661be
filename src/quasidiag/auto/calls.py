"""One call of the model: what it was given and what it gave, to be run again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quasidiag.auto.reading import Reading
from quasidiag.layers.composite import Surroundings
from quasidiag.probe import names, tensors


@dataclass(eq=False)
class Call:
    """One call of the model, with what it gave.

    ``versions`` are those of the outputs, ``entered`` those of the arguments as the model was given them.
    """

    arguments: tuple[Any, Any]
    around: Surroundings
    outputs: list[Tensor]
    versions: list[int]
    entered: list[int]

    def reading(self, output: Tensor) -> Reading | None:
        """How a criterion's output can be read off those of this call."""
        return Reading.find(output, self.outputs, self.versions)

    def part(self, share: float) -> Part | None:
        """The samples that make up a share of them, or ``None`` for all, also where it is not clear what they lie along."""
        if share == 1:
            return None
        lengths = {len(x) for x in tensors(self.arguments) if x.dim()}
        if len(lengths) != 1:
            return None
        samples = lengths.pop()
        kept = max(1, math.ceil(share * samples))
        return Part(kept, samples) if kept < samples else None


class Part(NamedTuple):
    """So many of the samples, at even distances: they may be sorted."""

    kept: int
    samples: int

    @property
    def share(self) -> float:
        """As it came to be, in whole samples."""
        return self.kept / self.samples

    def of(self, tree: Any) -> Any:
        """Those rows of all tensors in the arguments that have the samples in front."""
        return changed(tree, lambda x: self.rows(x) if x.dim() and len(x) == self.samples else x)

    def rows(self, x: Tensor) -> Tensor:
        """Those of a tensor with the same number of rows for every sample."""
        of_each = x.unflatten(0, (self.samples, -1))
        step, rest = divmod(self.samples, self.kept)
        if rest:
            picked = torch.arange(self.kept, device=x.device) * self.samples // self.kept
            return of_each[picked].flatten(0, 1)
        return of_each[::step].contiguous().flatten(0, 1)  # models may want it so, or write into it


def changed(
    tree: Any, change: Callable[[Tensor], Tensor], copies: Mapping[int, Any] = MappingProxyType({})
) -> Any:
    """A copy of the arguments with other tensors; what is neither a plain container nor a dataclass stays as it is.

    ``copies`` are those of what this lies in, by identity: it may lead back there.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(changed(branch, change, copies) for branch in tree)
    if id(tree) in copies or not (isinstance(tree, dict) or names(tree)):
        return copies.get(id(tree), tree)
    new = copy.copy(tree)
    copies = {**copies, id(tree): new}
    for key in tree if isinstance(tree, dict) else ():
        new[key] = changed(tree[key], change, copies)
    for name in names(tree):  # it may be frozen
        object.__setattr__(new, name, changed(getattr(tree, name), change, copies))
    return new


def versions(tree: Any) -> list[int]:
    """How often each tensor was written to; those made under ``inference_mode`` do not say."""
    return [-1 if x.is_inference() else x._version for x in tensors(tree)]
