"""docs/race.md shows the tables of ``quasidiag race --summary`` as they are in results/race."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tables_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "race.md").read_text("utf-8")
    tables = (ROOT / "results" / "race" / "tables.md").read_text("utf-8")
    found = [table for table in tables.split("\n\n") if table.startswith("|")]
    assert len(found) == 8
    for table in found:
        assert table.strip() in page
