"""Arguments that several commands share, and functions that check and convert their values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from pathlib import Path

import torch

from ..config import UsageError, suggest
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


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """``--jobs``."""
    parser.add_argument(
        "--jobs",
        type=whole,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs side by side (default: one for each core)",
    )


def add_scale(parser: argparse.ArgumentParser, scales: Collection[str]) -> None:
    """``--scale``."""
    parser.add_argument(
        "--scale",
        default="small",
        choices=scales,
        help="how many samples, epochs and seeds: from a quick look to the full size (default: small)",
    )


def add_runs(parser: argparse.ArgumentParser) -> None:
    """``--runs``."""
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where runs are kept (runs)")


def device(arguments: argparse.Namespace) -> str:
    """The device asked for; raises a UsageError if it is CUDA and there is none, which a dry run does not mind."""
    needed = arguments.device == "cuda" and not getattr(arguments, "dry_run", False)
    if needed and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here")
    return str(arguments.device)


def data_dir(arguments: argparse.Namespace) -> str | None:
    """The data folder as an absolute path, because workers may have another working directory; None means the cache."""
    folder = data_folder(arguments.data_dir)
    return None if folder is None else str(folder.resolve())


def runs_dir(arguments: argparse.Namespace, write: bool = True) -> str:
    """The folder of runs as an absolute path; to ``write`` there, it is created if missing and checked to be writable."""
    path = Path(arguments.runs).expanduser().resolve()
    if write:
        _make(path, f"--runs {arguments.runs}")
    return str(path)


def _make(folder: Path, given: str) -> None:
    """Create ``folder`` if missing; raise a UsageError that starts with ``given`` if it cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{given}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{given}: no permission to write there")


# Types for argparse. They reject bad values before any work is done; a UsageError prints one line, without the usage text.


def output(text: str) -> Path:
    """The path of a file to write; its folder is created if missing."""
    path = Path(text)
    if not path.exists():
        _make(path.parent, text)
    elif path.is_dir() or not os.access(path, os.W_OK):
        raise UsageError(f"{text}: not a file that can be written")
    return path


def picture(text: str) -> Path:
    """Like :func:`output`, but only for file types that matplotlib can write."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds, kind = FigureCanvasBase.get_supported_filetypes(), Path(text).suffix[1:]
    if kind.lower() not in kinds:
        raise suggest("kind of picture", kind, kinds)
    return output(text)


def existing(text: str) -> Path:
    """The path of a file that exists and can be read."""
    if not os.access(text, os.R_OK) or os.path.isdir(text):
        raise UsageError(f"there is no file {text} that can be read")
    return Path(text)


def whole(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
