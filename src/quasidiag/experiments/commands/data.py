"""``quasidiag data``: fetch, check and prepare the datasets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import datasets
from ..config import suggest
from ..files import DataError
from . import options


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("data", help="fetch, check and prepare the datasets")
    actions = parser.add_subparsers(dest="action", required=True, metavar="{check,prepare}")
    check = actions.add_parser("check", help="read datasets, fetching what is missing")
    prepare = actions.add_parser(
        "prepare",
        help="write datasets as compact files for a machine without network and readers",
        description="The folder that this writes can be given as --data-dir.",
    )
    prepare.add_argument("--out", metavar="DIR", required=True)
    for action in (check, prepare):
        action.add_argument("names", nargs="*", metavar="DATASET", help="default: all")
        options.add_data_dir(action)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check or prepare each dataset; the exit code is 2 if any could not be read."""
    names = arguments.names or list(datasets.NAMES)
    for name in names:
        if name not in datasets.NAMES:
            raise suggest("dataset", name, datasets.NAMES)
    code = 0
    for name in names:
        try:
            data = datasets.load(name, options.data_dir(arguments))
        except DataError as error:
            print(f"{name}: {error}", file=sys.stderr)
            code = 2
            continue
        shape = "×".join(map(str, data.inputs.shape))
        print(f"{name}: {shape}, {data.train_size:,} for training; {data.source}", flush=True)
        if arguments.action == "prepare":
            path = datasets.write_prepared(data, Path(arguments.out))
            print(f"  {path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
    return code
