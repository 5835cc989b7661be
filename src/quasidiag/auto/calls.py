"""One call of the model, and the criterion's call on its output, recorded so that they can be run again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quasidiag.auto.reading import Reading
from quasidiag.layers.composite import Surroundings
from quasidiag.probe import names, tensors
from quasidiag.strata import Part, Strata


@dataclass(eq=False)
class Call:
    """One call of the model: arguments, random state and autocast (``around``), outputs.

    ``versions`` are the version counters of the outputs, ``entered`` those of the arguments when the model was called.
    ``parts`` has the arguments for parts of the samples that were asked for so far: steps are tried on one several times.
    """

    arguments: tuple[Any, Any]
    around: Surroundings
    outputs: list[Tensor]
    versions: list[int]
    entered: list[int]
    parts: dict[Part, tuple[Any, Any]] = field(default_factory=dict)

    def reading(self, output: Tensor) -> Reading | None:
        """How the tensor that a criterion was called on follows from the outputs of this call; ``None`` if it does not."""
        return Reading.find(output, self.outputs, self.versions)

    @cached_property
    def samples(self) -> int:
        """The number of samples, by the first dimension of the arguments; 0 if it is not the same for all of them."""
        lengths = {len(x) for x in tensors(self.arguments) if x.dim()}
        return lengths.pop() if len(lengths) == 1 else 0

    def given(self, part: Part | None) -> tuple[Any, Any]:
        """The arguments for a part of the samples, or for all."""
        if part is None:
            return self.arguments
        if part not in self.parts:
            self.parts[part] = changed(
                self.arguments, lambda x: part.rows(x) if x.dim() and len(x) == part.samples else x
            )
        return self.parts[part]


class Piece(NamedTuple):
    """The targets of so many rows of an output, and how many terms of the loss they stand for."""

    rows: int
    target: Tensor
    terms: float


@dataclass(eq=False)
class Batch:
    """A call of the model and the criterion's call on its output.

    ``weight`` is the factor of this loss in what was backpropagated, ``None`` before. ``values`` has the losses in
    float64 that were computed so far, by the part of the samples (``None`` for all), ``pieces`` what is the same for all
    losses of a part, and ``counts`` how many terms they have; ``parts`` has the parts that were chosen so far, by how many
    samples they have, ``strata`` what they are chosen from and ``terms`` how many terms the loss has, once these are known.
    """

    call: Call
    reading: Reading | None
    output: Tensor
    target: Tensor
    version: list[int]
    loss: Tensor
    weight: Tensor | None = None
    values: dict[Part | None, Tensor] = field(default_factory=dict)
    pieces: dict[Part | None, list[Piece]] = field(default_factory=dict)
    counts: dict[Part, int] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    strata: Strata | None = None
    terms: int | None = None

    @property
    def intact(self) -> bool:
        """Whether arguments, outputs and target have not been written to since the forward pass."""
        arguments = versions(self.call.arguments) == self.call.entered
        outputs = [x._version for x in self.call.outputs] == self.call.versions
        return arguments and outputs and versions(self.target) == self.version

    def targets(self, part: Part | None) -> Tensor:
        """The targets of a part of the samples, or of all."""
        return self.target if part is None else part.rows(self.target)


def changed(
    tree: Any, change: Callable[[Tensor], Tensor], copies: Mapping[int, Any] = MappingProxyType({})
) -> Any:
    """A copy of ``tree`` with ``change`` applied to its tensors; only plain containers and dataclasses are copied.

    ``copies`` maps the ids of the containers around ``tree`` to their copies, because it may refer back to them.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)([changed(branch, change, copies) for branch in tree])
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
