"""Time full training steps of every optimizer, in turns, beside those of SGD or AdamW.

There is one table per network, with milliseconds, the ratio to the base, the least that this ratio can be by its count
of multiplications, and the memory; then come tables of the cost against width, depth, batch size and classes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from quasidiag.bench import measure, peers, presets, show
from quasidiag.experiments import datasets
from quasidiag.experiments.commands import options
from quasidiag.experiments.config import UsageError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time full training steps against SGD's, with the floor of the arithmetic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "preset",
        nargs="?",
        choices=sorted(presets.PRESETS),
        default="h200" if torch.cuda.is_available() else "cpu",
        help="what to measure (default: by the machine)",
    )
    parser.add_argument("--peers", action="store_true", help="add other packages that are here")
    parser.add_argument(
        "--rounds", type=options.whole, help="rounds of interleaved timing (default: by preset)"
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="count processor time of one thread, not the wall's: for a machine that others use too",
    )
    parser.add_argument("--no-curves", action="store_true", help="leave out cost against size")
    parser.add_argument(
        "--losses",
        type=options.whole,
        metavar="EPOCHS",
        help="also train on MNIST with the full and the amortised metric",
    )
    parser.add_argument("--data-dir", help="folder of the datasets (default: as 'quasidiag data')")
    parser.add_argument("--json", type=options.output, metavar="FILE", help="write the results")
    parser.add_argument(
        "--plot", type=options.picture, metavar="FILE", help="draw the results (.svg, .png)"
    )
    parser.add_argument(
        "--into",
        type=options.existing,
        metavar="FILE",
        help="put the tables into a Markdown page, between <!-- bench PRESET --> and <!-- end -->",
    )
    parser.add_argument(
        "--from",
        type=options.existing,
        dest="source",
        metavar="FILE",
        help="show earlier results, time nothing (with --peers: nothing but those)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or read earlier results; then write, draw and print them."""
    found, missing = peers.installed() if arguments.peers else ({}, {})
    results = _read(arguments.source) if arguments.source else {"preset": arguments.preset}
    if arguments.into:
        show.parts(arguments.into.read_text(encoding="utf-8"), results["preset"])
    if arguments.source:
        if arguments.peers:
            preset = presets.PRESETS[results["preset"]]()
            busy = results["clock"] == "processor"
            measure.add_peers(results, preset, found, arguments.rounds, _say, busy)
            results["not_installed"] = missing
        if arguments.no_curves:
            results["curves"] = []
    else:
        preset = presets.PRESETS[arguments.preset](arguments.data_dir)
        if preset.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("no CUDA device here: use the preset cpu")
        if preset.digits:
            datasets.digits(
                arguments.data_dir
            )  # if there are none, that is known before anything is timed
        if arguments.no_curves:
            preset.curves.clear()
        results |= measure.run(preset, found, arguments.rounds, _say, arguments.busy)
        results["not_installed"] = missing
        if arguments.losses:
            from quasidiag.bench import losses

            results["amortised"] = losses.run(
                preset.device, arguments.data_dir, arguments.losses, _say
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.into:
        page = show.insert(results, arguments.into.read_text(encoding="utf-8"))
        arguments.into.write_text(page, encoding="utf-8")
    if arguments.plot:
        show.plot(results, arguments.plot)
    print(show.tables(results))  # last: the reader of a pipe may close it early
    return 0


def _read(source: Path) -> dict[str, Any]:
    """The results that an earlier call wrote with ``--json``."""
    try:
        results = json.loads(source.read_text(encoding="utf-8"))
    except ValueError:
        results = None
    if not isinstance(results, dict) or "races" not in results:
        raise UsageError(f"{source} has no results of quasidiag bench --json")
    return results


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
