"""``quasidiag export``: all runs in one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..export import export


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("export", help="pack a folder of runs into one file")
    parser.add_argument("runs", metavar="RUNS", help="the folder given to reproduce --runs")
    parser.add_argument("out", metavar="OUT.json.gz", help="a file that quasidiag report reads too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file and say how large it is."""
    count = export(arguments.runs, arguments.out)
    size = Path(arguments.out).stat().st_size
    print(f"{arguments.out}: {count} runs, {size / 1e6:.2f} MB")
    return 0 if count else 1
