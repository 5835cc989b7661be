"""Arguments that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from ..config import UsageError
from ..files import data_folder


def add_data_dir(parser: argparse.ArgumentParser) -> None:
    """``--data-dir``."""
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="folder with the datasets (default: $QUASIDIAG_DATA, else they are fetched into a cache)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """``--device``."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def add_runs(parser: argparse.ArgumentParser) -> None:
    """``--runs``."""
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where runs are kept (runs)")


def device(arguments: argparse.Namespace) -> str:
    """The device, once it is sure that there is one."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here")
    return str(arguments.device)


def data_dir(arguments: argparse.Namespace) -> str | None:
    """The data folder as an absolute path, for workers that may run elsewhere."""
    folder = data_folder(arguments.data_dir)
    return None if folder is None else str(folder.resolve())


def runs_dir(arguments: argparse.Namespace) -> str:
    """The folder of runs as an absolute path, which can be written to."""
    path = Path(arguments.runs).expanduser().resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--runs {arguments.runs}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"--runs {arguments.runs}: no permission to write there")
    return str(path)


def whole(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
