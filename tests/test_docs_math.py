"""docs/math.md names functions: each of them exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "math.md"
NAMES = sorted(set(re.findall(r"`(quasidiag(?:\.\w+)+)`", PAGE.read_text())))


def resolve(name: str) -> object:
    """The object of that name: as much of it as is a module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_map_leads_somewhere(name: str) -> None:
    assert resolve(name) is not None


def test_the_map_names_the_public_routines() -> None:
    assert {"quasidiag.qd_solve", "quasidiag.qd_rank_one_update", "quasidiag.QDNat"} <= set(NAMES)
