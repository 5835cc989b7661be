"""``quasidiag run``: one network, one algorithm, any setting."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .. import datasets, execute, tasks
from ..algorithms import ALGORITHMS, known_gamma
from ..config import Config, suggest
from ..runs import Line, RunDir
from . import options


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="train one network with one algorithm",
        description="One run of an experiment, with any number of its settings changed.",
        epilog="example: quasidiag run mnist --algorithm QDMCNat lr=0.01 epochs=3 layers=784,100,10",
    )
    parser.add_argument("task", metavar="TASK", help="an experiment (see quasidiag list)")
    parser.add_argument(
        "--algorithm", "-a", default="QDOP", help="see quasidiag list (default: QDOP)"
    )
    parser.add_argument("--variant", help="such as sigmoid, tanh, relu (default: the first)")
    options.add_scale(parser, tasks.SCALES)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="any key of the config")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config only")
    options.add_device(parser)
    options.add_runs(parser)
    options.add_data_dir(parser)
    parser.set_defaults(run=run)


def resolve(arguments: argparse.Namespace) -> Config:
    """The config that the arguments describe."""
    experiment = tasks.find(arguments.task)
    if arguments.algorithm not in ALGORITHMS:
        raise suggest("algorithm", arguments.algorithm, ALGORITHMS)
    variant = arguments.variant or next(iter(experiment.variants))
    middle = experiment.grid(arguments.algorithm, "small")[1]
    config = experiment.config(
        variant,
        arguments.algorithm,
        middle,
        scale=arguments.scale,
        device=options.device(arguments),
    ).override(arguments.settings)
    if config.algorithm != arguments.algorithm and not any(
        setting.startswith("gamma=") for setting in arguments.settings
    ):
        config = config.override([f"gamma={known_gamma(config.algorithm)}"])
    if config.dataset == "mnist" and not arguments.dry_run:
        name, sentence = datasets.digits(options.data_dir(arguments))
        if name != config.dataset:
            print(sentence, file=sys.stderr)
            config = config.override([f"dataset={name}"])
    return config


def run(arguments: argparse.Namespace) -> int:
    """Train, and print one line per epoch."""
    config = resolve(arguments)
    if arguments.dry_run:
        for key, value in config.to_dict().items():
            print(f"{key}={value}")
        return 0
    root = options.runs_dir(arguments)
    result = execute.execute(
        config, root, data_dir=options.data_dir(arguments), on_epoch=lambda line: print(_line(line))
    )
    assert result is not None  # there is no deadline
    final = result["final"]
    print(
        f"{result['status']} after {result['epochs']} epochs, {result['seconds']:.1f} s of updates"
    )
    print(f"{_line(final)}\n{RunDir(root, config).path}")
    return 0 if result["status"] == "finished" else 1


def _line(line: Line) -> str:
    values = (
        f"{key} {value:.5g}" if value is not None else f"{key} not finite"
        for key, value in line.items()
        if key not in ("epoch", "seconds")
    )
    return f"epoch {line['epoch']:3d}  {line['seconds']:7.2f} s  " + "  ".join(values)
