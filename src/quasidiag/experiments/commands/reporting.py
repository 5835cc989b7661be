"""``quasidiag report``: the report of a folder of runs, or of an export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("report", help="write the report of a folder of runs")
    parser.add_argument("runs", metavar="RUNS", help="a folder of runs, or an export of one")
    parser.add_argument("--out", metavar="DIR", default="report", help="where to write it (report)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the report and say where."""
    from .. import report

    print(report.write(Path(arguments.runs), Path(arguments.out)))
    return 0
