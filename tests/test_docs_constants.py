"""docs/auto-details.md has a table of constants: each value is the source's, and of a file that is in it none is missing."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "auto-details.md"
ROWS = re.findall(r"^\| `(\w+)\.(\w+)` \| `(.+?)` \|", PAGE.read_text("utf-8"), re.MULTILINE)


def place(module: str) -> str:
    """Where a module of the table is."""
    above = module in ("defaults", "strata")
    return f"quasidiag.{module}" if above else f"quasidiag.auto.{module}"


def constants(module: str) -> set[str]:
    """The numbers, and tuples of numbers, that a module names in capitals."""
    found = importlib.import_module(place(module))
    assigned = (s for s in ast.parse(inspect.getsource(found)).body if isinstance(s, ast.Assign))
    targets = [target for statement in assigned for target in statement.targets]
    names = [node.id for t in targets for node in ast.walk(t) if isinstance(node, ast.Name)]
    return {name for name in names if name.isupper() and numeric(getattr(found, name))}


def numeric(value: object) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(x, int | float) for x in values)


@pytest.mark.parametrize(("module", "name", "value"), ROWS)
def test_the_value_is_the_source_s(module: str, name: str, value: str) -> None:
    assert repr(getattr(importlib.import_module(place(module)), name)) == value


@pytest.mark.parametrize("module", sorted({module for module, _, _ in ROWS}))
def test_no_constant_is_missing(module: str) -> None:
    assert constants(module) == {name for of, name, _ in ROWS if of == module}


def test_there_is_a_table() -> None:
    assert len(ROWS) > 50
