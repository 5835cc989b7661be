"""Small stand-ins for the datasets, in the format of ``quasidiag data prepare``, so that everything runs anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from quasidiag.experiments.datasets import Data, write_prepared

SIZE = 240  # 200 to train on, 40 to check


def stand_in(name: str, classes: bool, image: tuple[int, int] | None, width: int) -> Data:
    """Ten noisy prototypes: something that a network can learn."""
    rng = np.random.default_rng(len(name))
    labels = rng.integers(10, size=SIZE)
    prototypes = rng.random((10, width))
    x = 0.7 * prototypes[labels] + 0.3 * rng.random((SIZE, width))
    inputs = (x * 255).astype(np.uint8) if image else (x - x.mean(0)).astype(np.float32)
    return Data(name, inputs, labels.astype(np.uint8) if classes else None, image, "a stand-in")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_prepared(stand_in("mnist", True, (28, 28), 784), folder)
    write_prepared(stand_in("svhn", True, (32, 32), 1024), folder)
    write_prepared(stand_in("faces", False, (45, 45), 2025), folder)
    write_prepared(stand_in("eeg", False, None, 56), folder)
    return str(folder)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The real files: ``QUASIDIAG_DATA``, or ``shared/data`` beside the repository."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("QUASIDIAG_DATA") or beside)
    if not (folder / "mnist").is_dir():
        pytest.skip("the real datasets are not at hand")
    return folder


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache in the place of the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("QUASIDIAG_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch):
    """No test sees the user's data, and none leaves its settings behind."""
    monkeypatch.delenv("QUASIDIAG_DATA", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
