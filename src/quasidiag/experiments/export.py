"""Packs all runs of a folder into one compact file, to copy from a remote machine and to report on or resume from."""

from __future__ import annotations

import base64
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from .config import Config, UsageError
from .runs import Collection, Line, Run, RunDir, load, read_json, write_atomically, write_json

FORMAT = 1
#: Metrics left out of an export, and those they are computed from on reading: mse = 2 error / outputs.
_MSE = {"train_mse": "train_error", "valid_mse": "valid_error"}


def export(runs: str | os.PathLike[str], out: str | os.PathLike[str]) -> int:
    """Write every curve and result of ``runs`` to ``out`` (``.json.gz``); return the number of runs.

    Of the runs of a sweep only those keep their pictures that a report shows: for each algorithm
    the first seed at its best step size.
    """
    collection = load(runs)
    swept = _swept(collection)
    environments: list[dict[str, Any]] = []
    content = {
        "format": FORMAT,
        "sweeps": collection.sweeps,
        "timing": collection.timing,
        "runs": [_packed(run, environments, swept.get(run.id, True)) for run in collection.runs],
        "environments": environments,
    }
    raw = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(out), lambda path: path.write_bytes(raw))
    return len(collection.runs)


def _swept(collection: Collection) -> dict[str, bool]:
    """The ids of all runs of the sweeps, and whether a report shows their pictures."""
    cells = [cell for sweep in collection.sweeps.values() for cell in sweep["cells"]]
    tried = {entry["id"]: False for cell in cells for entry in cell["lrs"]}
    tried |= {name: False for cell in cells for name in cell["runs"]}
    return tried | {cell["runs"][0]: True for cell in cells if cell["runs"]}


def _packed(run: Run, environments: list[dict[str, Any]], pictures: bool) -> dict[str, Any]:
    """A run, ready for JSON: metrics as columns, rounded to six digits, without ``_MSE``; the environment as an index."""
    shared = {key: value for key, value in run.environment.items() if key != "started"}
    if shared not in environments:
        environments.append(shared)
    keys = [key for key in run.metrics[0] if key not in _MSE] if run.metrics else []
    packed: dict[str, Any] = {
        "id": run.id,
        "config": run.config,
        "environment": environments.index(shared),
        "result": run.result,
        "metrics": {key: [_short(line.get(key)) for line in run.metrics] for key in keys},
    }
    if pictures and run.pictures is not None:
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
    if run["config"]["output"] != "categorical" and columns:
        for key, error in _MSE.items():
            width = run["config"]["layers"][-1]
            columns[key] = [None if e is None else 2 * e / width for e in columns[error]]
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


def restore(
    path: Path,
    root: str | os.PathLike[str],
    kind: type[Config] = Config,
    dry_run: bool = False,
) -> dict[str, Line]:
    """Put the ended runs of an export into the folder ``root``, say how many, and return their results by id.

    ``kind`` is the class of their configs. Runs already there are kept; a dry run writes nothing.
    """
    collection = read_export(path)
    ended = [
        (RunDir(root, kind.from_dict(run.config)), run) for run in collection.runs if run.result
    ]
    new = [(store, run) for store, run in ended if store.result is None]
    known = len(ended) - len(new)
    here = f", {'all' if not new else known} of them here already" if known else ""
    print(f"{len(ended)} runs in {path}{here}", flush=True)
    if not dry_run:
        for store, run in new:
            with store.locked():
                store.fill(run)
        timing = Path(root) / "timing.json"
        if collection.timing:
            write_json(timing, {**collection.timing, **(read_json(timing) or {})})
    return {store.config.id: run.result for store, run in ended}
