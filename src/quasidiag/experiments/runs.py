"""Runs on disk: one directory each, which stays consistent even after a ``kill -9`` at any moment.

``RUNS/runs/<hash of the config>/`` holds ``config.json``, ``environment.json``, ``metrics.jsonl``
(append-only: a later line for the same epoch replaces the earlier one), ``checkpoint.pt`` while the
run is unfinished, and ``result.json``, which is written atomically at the end: a run has ended if
and only if that file exists.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import Config, UsageError
from .models import parameter_count
from .train import Trainer

Line = dict[str, Any]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file, then rename it to ``path``: readers see all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as a JSON file, atomically."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


class RunDir:
    """The directory of one run."""

    def __init__(self, root: str | os.PathLike[str], config: Config) -> None:
        self.config = config
        self.path = Path(root) / "runs" / config.id

    @property
    def result(self) -> Line | None:
        """The result of the run; None until it has ended."""
        return read_json(self.path / "result.json")

    def metrics(self) -> list[Line]:
        """One line per evaluated epoch, in order."""
        return read_metrics(self.path / "metrics.jsonl")

    def begin(self, environment: dict[str, Any]) -> None:
        """Write the config and the environment, which are known before training."""
        write_json(self.path / "config.json", self.config.to_dict())
        write_json(self.path / "environment.json", environment)
        for leftover in self.path.glob(".*.[0-9]*"):  # left by a process killed while writing
            leftover.unlink(missing_ok=True)

    def append(self, line: Line) -> None:
        """Add a line of metrics; if a killed process left an incomplete last line, that line is ended first."""
        path = self.path / "metrics.jsonl"
        torn = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"
        with path.open("a") as stream:
            stream.write(("\n" if torn else "") + json.dumps(line, allow_nan=False) + "\n")

    def save(self, trainer: Trainer) -> None:
        """Replace the checkpoint."""
        state = trainer.state_dict()
        write_atomically(self.path / "checkpoint.pt", lambda path: torch.save(state, path))

    def restore(self, trainer: Trainer) -> bool:
        """Load the checkpoint into ``trainer``; return whether there is one."""
        path = self.path / "checkpoint.pt"
        if not path.exists():
            return False
        trainer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return True

    def finish(self, trainer: Trainer, reason: str | None) -> Line:
        """Write and return the result, and delete the checkpoint; ``reason`` says why the run diverged, if it did."""
        lines = self.metrics()
        pictures = trainer.pictures()
        if pictures is not None:
            target = self.path / "reconstructions.npz"
            write_atomically(target, lambda path: _savez(path, pictures))
        keys = [key for key in lines[0] if key not in ("epoch", "seconds", "within")]
        values = {key: [line[key] for line in lines if line.get(key) is not None] for key in keys}
        result = {
            "status": "diverged" if reason else "finished",
            "reason": reason,
            "epochs": trainer.epoch,
            "seconds": trainer.seconds,
            "parameters": parameter_count(trainer.model, trainer.criterion),
            "initial": _without_curve(lines[0]),
            "final": _without_curve(lines[-1]),
            "best": {key: min(values[key], default=None) for key in keys},
        }
        write_json(self.path / "result.json", result)
        (self.path / "checkpoint.pt").unlink(missing_ok=True)
        return result

    def fill(self, run: Run) -> None:
        """Write a run that was done elsewhere; the result comes last, because it marks the run as ended."""
        self.begin(run.environment)
        lines = "".join(json.dumps(line, allow_nan=False) + "\n" for line in run.metrics)
        write_atomically(self.path / "metrics.jsonl", lambda path: path.write_text(lines))
        pictures = run.pictures
        if pictures is not None:
            target = self.path / "reconstructions.npz"
            write_atomically(target, lambda path: _savez(path, pictures))
        write_json(self.path / "result.json", run.result)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this run, which is released when its process ends (no lock on Windows)."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl
        except ModuleNotFoundError:  # Windows
            yield
            return
        with (self.path / ".lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _without_curve(line: Line) -> Line:
    return {key: value for key, value in line.items() if key != "within"}


def _savez(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None if there is no file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def read_metrics(path: Path) -> list[Line]:
    """The lines of a metrics file, the last one for each epoch, without incomplete ones."""
    lines: dict[int, Line] = {}
    if path.exists():
        for text in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                lines[line["epoch"]] = line
    return [lines[epoch] for epoch in sorted(lines)]


@dataclass(frozen=True)
class Run:
    """A run as read from disk; ``result`` is empty if it has not ended.

    ``pictures``, for autoencoders of images, are ``original`` and ``reconstruction`` [k, height, width] as bytes.
    """

    id: str
    config: dict[str, Any]
    metrics: list[Line]
    result: Line
    environment: dict[str, Any]
    pictures: dict[str, np.ndarray] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Collection:
    """The content of a folder of runs, or of an export of one."""

    runs: list[Run]
    sweeps: dict[str, dict[str, Any]]
    timing: dict[str, Any] | None


def load(path: str | os.PathLike[str]) -> Collection:
    """Read a folder of runs, or the file that ``quasidiag export`` made of one."""
    path = Path(path)
    if path.is_file():
        from .export import read_export

        return read_export(path)
    if not path.is_dir():
        raise UsageError(f"there are no runs in {path}")
    runs = [_read_run(entry.parent) for entry in sorted(path.glob("runs/*/config.json"))]
    sweeps = {entry.stem: read_json(entry) for entry in sorted(path.glob("sweeps/*.json"))}
    return Collection(runs, sweeps, read_json(path / "timing.json"))


def _read_run(path: Path) -> Run:
    pictures = None
    if (path / "reconstructions.npz").exists():
        with np.load(path / "reconstructions.npz") as arrays:
            pictures = {key: arrays[key] for key in arrays.files}
    return Run(
        path.name,
        read_json(path / "config.json"),
        read_metrics(path / "metrics.jsonl"),
        read_json(path / "result.json") or {},
        read_json(path / "environment.json") or {},
        pictures,
    )
