"""Every Python block of the documentation and the README runs; the blocks of a page share a namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quasidiag

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        # Blank lines before the code, so that a traceback shows the line of the page.
        above = "\n" * (text.count("\n", 0, block.start()) + 1)
        exec(compile(above + block[1], str(page), "exec"), names)
    assert not list(tmp_path.iterdir()), "a page leaves no files behind"


def test_there_are_pages() -> None:
    assert len(PAGES) >= 8


@pytest.mark.parametrize("place", ["README.md", "docs/index.md", "mkdocs.yml", "pyproject.toml"])
def test_the_price_is_the_same_everywhere(place: str) -> None:
    assert quasidiag.__doc__ is not None and "times the cost of SGD" in quasidiag.__doc__
    assert quasidiag.__doc__.rstrip(".") in (ROOT / place).read_text(encoding="utf-8")


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    pages = (ROOT / "docs").rglob("*.md")
    assert not [p for p in pages if "pip install quasidiag" in p.read_text(encoding="utf-8")]
