"""The resolved description of one run: everything that its numbers depend on, and its name on disk."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


class UsageError(Exception):
    """The user asked for something that does not exist; the message says what does."""


def suggest(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """An error for an unknown ``name`` that suggests the nearest of ``known``, or lists all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")


@dataclass(frozen=True)
class Config:
    """One run. Sizes are in samples, ``None`` means all; ``fan_in`` is set for sparse layers only."""

    experiment: str
    variant: str
    algorithm: str
    lr: float
    dataset: str
    layers: tuple[int, ...]
    epochs: int
    seed: int = 0
    scale: str = "small"
    inverted: bool = False
    activation: str = "sigmoid"
    fan_in: int | None = None
    dropout: float = 0.0
    input_dropout: float = 0.0
    output: str = "categorical"
    batch_size: int = 500
    train_size: int | None = None
    valid_size: int | None = None
    eval_size: int | None = None
    eval_every: int = 1
    gamma: float = 0.01
    eps: float = 1e-8
    floor: float | None = 0.0  # as the authors'; with a floor sigmoid and tanh train differently
    samples: int = 1
    momentum: float = 0.0
    device: str = "cpu"

    @property
    def autoencoder(self) -> bool:
        """Whether the target is the input itself."""
        return self.output != "categorical"

    @property
    def id(self) -> str:
        """The name of the run: a hash of all its fields."""
        canonical = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The fields as values that JSON can hold."""
        return {**asdict(self), "layers": list(self.layers)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Config:
        """The inverse of :meth:`to_dict`."""
        return Config(**{**values, "layers": tuple(values["layers"])})

    def override(self, assignments: Iterable[str]) -> Config:
        """The config with ``key=value`` strings applied; a wrong key or value raises a UsageError with a hint."""
        kinds = {field.name: str(field.type) for field in fields(self)}
        changes: dict[str, Any] = {}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise UsageError(f"{assignment!r} is not of the form key=value")
            if key not in kinds:
                raise suggest("key", key, kinds)
            changes[key] = _parse(key, text, kinds[key])
        return replace(self, **changes)


def _parse(key: str, text: str, kind: str) -> Any:
    """``text`` as a value of the field ``key``, whose type is ``kind``."""
    if kind == "str":
        return text
    if "None" in kind and text.lower() in ("none", "null", "all"):
        return None
    try:
        value = ast.literal_eval(text.capitalize() if kind == "bool" else text)
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind.startswith("tuple"):
            return tuple(int(n) for n in value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if kind.startswith("float"):
                return float(value)
            if kind.startswith("int") and value == int(value):
                return int(value)
    except (ValueError, SyntaxError, TypeError):
        pass
    raise UsageError(f"{key}={text}: expected a value of type {kind}")
