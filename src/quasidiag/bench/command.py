"""The command ``quasidiag bench``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from quasidiag.bench import measure, peers, presets, show


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time full training steps against SGD's, with the floor of the arithmetic",
        description=__doc__,
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
        "--rounds", type=int, help="rounds of interleaved timing (default: by preset)"
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="count processor time of one thread, not the wall's: for a machine that others use too",
    )
    parser.add_argument("--no-curves", action="store_true", help="leave out cost against size")
    parser.add_argument(
        "--losses",
        type=int,
        metavar="EPOCHS",
        help="also train on MNIST with the full and the amortised metric",
    )
    parser.add_argument("--data-dir", help="folder of the datasets (default: as 'quasidiag data')")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (.svg, .png)")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="put the tables into a Markdown page, between <!-- bench PRESET --> and <!-- end -->",
    )
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="show earlier results, time nothing (with --peers: nothing but those)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure (or read), print, write."""
    found, missing = peers.installed() if arguments.peers else ({}, {})
    if arguments.source:
        results = json.loads(arguments.source.read_text())
        if arguments.peers:
            preset = presets.PRESETS[results["preset"]]()
            busy = results["clock"] == "processor"
            measure.add_peers(results, preset, found, arguments.rounds, _say, busy)
            results["not_installed"] = missing
    else:
        preset = presets.PRESETS[arguments.preset]()
        if preset.device == "cuda" and not torch.cuda.is_available():
            print("no CUDA device here: use the preset cpu", file=sys.stderr)
            return 2
        if arguments.no_curves:
            preset.curves.clear()
        results = measure.run(preset, found, arguments.rounds, _say, arguments.busy)
        results = {"preset": arguments.preset, **results, "not_installed": missing}
        if arguments.losses:
            from quasidiag.bench import losses

            results["amortised"] = losses.run(
                preset.device, arguments.data_dir, arguments.losses, _say
            )
    print(show.tables(results))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.into:
        page = show.insert(results, arguments.into.read_text(encoding="utf-8"))
        arguments.into.write_text(page, encoding="utf-8")
    if arguments.plot:
        show.plot(results, arguments.plot)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
