"""All runs of a folder in one compact file, to carry home from a machine that gives little back."""

from __future__ import annotations

import base64
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from .config import UsageError
from .runs import Collection, Line, Run, load, write_atomically

FORMAT = 1


def export(runs: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Write every curve, result and picture of ``runs`` to ``out`` (``.json.gz``); how many runs there were."""
    collection = load(runs)
    environments: list[dict[str, Any]] = []
    content = {
        "format": FORMAT,
        "sweeps": collection.sweeps,
        "timing": collection.timing,
        "runs": [_packed(run, environments) for run in collection.runs],
        "environments": environments,
    }
    raw = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(out), lambda path: path.write_bytes(raw))
    return len(collection.runs)


def _packed(run: Run, environments: list[dict[str, Any]]) -> dict[str, Any]:
    """A run with its metrics as columns of six digits, and its environment as a number."""
    shared = {key: value for key, value in run.environment.items() if key != "started"}
    if shared not in environments:
        environments.append(shared)
    keys = list(run.metrics[0]) if run.metrics else []
    packed: dict[str, Any] = {
        "id": run.id,
        "config": run.config,
        "environment": environments.index(shared),
        "result": run.result,
        "metrics": {key: [_short(line.get(key)) for line in run.metrics] for key in keys},
    }
    if run.pictures is not None:
        shape = list(next(iter(run.pictures.values())).shape)
        coded = {k: base64.b64encode(v.tobytes()).decode() for k, v in run.pictures.items()}
        packed["reconstructions"] = {"shape": shape, **coded}
    return packed


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_export(path: Path) -> Collection:
    """The collection that :func:`export` wrote."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        if content["format"] != FORMAT:
            raise UsageError(f"{path} has format {content['format']}, this version reads {FORMAT}")
        runs = [_unpacked(run, content["environments"]) for run in content["runs"]]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is not an export of runs: {error}") from None
    return Collection(runs, content["sweeps"], content["timing"])


def _unpacked(run: dict[str, Any], environments: list[dict[str, Any]]) -> Run:
    columns = run["metrics"]
    lines: list[Line] = [dict(zip(columns, values)) for values in zip(*columns.values())]
    pictures = None
    if "reconstructions" in run:
        coded = dict(run["reconstructions"])
        shape = coded.pop("shape")
        pictures = {
            k: np.frombuffer(base64.b64decode(v), np.uint8).reshape(shape) for k, v in coded.items()
        }
    environment = environments[run["environment"]]
    return Run(run["id"], run["config"], lines, run["result"], environment, pictures)
