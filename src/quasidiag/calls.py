"""One call of the model: what it was given and what it gave, to be run again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quasidiag.layers.composite import Surroundings
from quasidiag.probe import tensors
from quasidiag.reading import Reading


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
        lengths = {len(x) for x in tensors(self.arguments) if x.dim()}
        if share == 1 or len(lengths) != 1:
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
        picked = torch.arange(self.kept, device=x.device) * self.samples // self.kept
        return x.unflatten(0, (self.samples, -1))[picked].flatten(0, 1)


def changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of the arguments with other tensors; what :func:`tensors` does not look into stays as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(changed(branch, change) for branch in tree)
    if isinstance(tree, dict):
        tree = copy.copy(tree)
        for key, branch in tree.items():
            tree[key] = changed(branch, change)
    elif is_dataclass(tree) and not isinstance(tree, type):
        tree = copy.copy(tree)
        for field in fields(tree):  # it may be frozen
            object.__setattr__(tree, field.name, changed(getattr(tree, field.name), change))
    return tree


def versions(tree: Any) -> list[int]:
    """How often each tensor was written to; those made under ``inference_mode`` do not say."""
    return [-1 if x.is_inference() else x._version for x in tensors(tree)]
