"""A progress bar where there is a terminal (and rich), plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Advance = Callable[[str], None]


@contextmanager
def progress(title: str, total: int, every: float = 0.0) -> Iterator[Advance]:
    """Yield ``advance(what)``, to call after each of ``total`` items; plain lines come at most every ``every`` seconds."""
    bar = _rich_bar(title, total) if sys.stdout.isatty() else None
    if bar is None:
        yield _plain(total, every)
        return
    with bar as shown:
        task = shown.add_task(title, total=total, what="")
        yield lambda what: shown.update(task, advance=1, what=what)


def _plain(total: int, every: float) -> Advance:
    done, last = 0, 0.0
    width = len(str(total))

    def advance(what: str) -> None:
        nonlocal done, last
        done += 1
        if done == total or time.monotonic() - last >= every:
            last = time.monotonic()
            print(f"[{done:{width}d}/{total}] {what}", flush=True)

    return advance


def _rich_bar(title: str, total: int):  # type: ignore[no-untyped-def]
    try:
        from rich import progress as rich
    except ModuleNotFoundError:
        return None
    columns = [
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.fields[what]}", style="dim"),
    ]
    return rich.Progress(*columns)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table with rich on a terminal, as aligned text elsewhere. Columns of numbers are aligned at the right."""
    numbers = [all(row[k][:1] in "0123456789-" for row in rows) for k in range(len(headers))]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            pass
        else:
            pretty = Table(title=title or None)
            for header, number in zip(headers, numbers):
                pretty.add_column(header, justify="right" if number else "left")
            for row in rows:
                pretty.add_row(*row)
            Console().print(pretty)
            return
    widths = [max(len(row[k]) for row in [headers, *rows]) for k in range(len(headers))]
    if title:
        print(f"\n{title}")
    for row in [headers, ["-" * width for width in widths], *rows]:
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers)
        ]
        print("  ".join(cells).rstrip(), flush=True)
