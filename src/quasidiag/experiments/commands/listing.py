"""``quasidiag list``: what there is to run."""

from __future__ import annotations

import argparse
from typing import Any

from .. import datasets, tasks, timing
from ..algorithms import ALGORITHMS
from ..progress import table


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "list",
        help="list experiments, algorithms and datasets",
        description="What the commands run and reproduce know by name.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    rows = []
    for name in tasks.NAMES:
        if name == tasks.TIMING:
            rows.append((name, "Table 1", timing.TITLE, "mnist", _sizes(timing.LAYERS), "sigmoid"))
            continue
        e = tasks.find(name)
        rows.append((name, e.paper, e.title, e.dataset, _sizes(e.layers), ", ".join(e.variants)))
    table(("name", "paper", "what", "dataset", "network", "variants"), rows, "Experiments")
    print(f"\nalgorithms: {', '.join(ALGORITHMS)}")
    print(f"datasets:   {', '.join(datasets.NAMES)}")
    print(f"scales:     {', '.join(tasks.SCALES)}")
    return 0


def _sizes(layers: tuple[int, ...]) -> str:
    return "-".join(map(str, layers))
