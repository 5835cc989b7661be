"""Where the data files come from, and whether they are what they should be.

A file is looked for in the data folder (``--data-dir`` or ``QUASIDIAG_DATA``) or, when none is
given, in a cache that pooch fills with the public originals. Every file is checked against a digest
before it is read: the one listed here (a SHA-256, or the MD5 that SVHN publishes) or, for files
made by ``quasidiag data prepare``, the SHA-256 in the ``SHA256SUMS`` beside them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quasidiag.cache import cache_folder

SUMS = "SHA256SUMS"


class DataError(Exception):
    """A data file is missing, truncated or altered; the message names it and says where to get it."""


@dataclass(frozen=True)
class Origin:
    """A file's digest and where to get it: a ``url``, or ``advice`` if it has to be converted from another file."""

    hash: str
    url: str | None
    advice: str = ""

    def __str__(self) -> str:
        return self.url or self.advice


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_EEG = "https://physionet.org/files/eegmmidb/1.0.0/S001/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"

ORIGINS: Mapping[str, Origin] = {
    "mnist/train-images-idx3-ubyte.gz": Origin(
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        _MNIST + "train-images-idx3-ubyte.gz",
    ),
    "mnist/train-labels-idx1-ubyte.gz": Origin(
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        _MNIST + "train-labels-idx1-ubyte.gz",
    ),
    "svhn/train_32x32.mat": Origin(
        "md5:e26dedcc434d2e4c54c9b2d4a06d8373", _SVHN + "train_32x32.mat"
    ),
    "svhn/svhn_gray32.npz": Origin(
        "d5a9ec4f5e2d61fe6a81ae8866c3663604c9a89706f5d1b3946c9dda9a32feda",
        None,
        f"put {_SVHN}train_32x32.mat in its place; it is converted when first used",
    ),
    "faces/lfw.tgz": Origin(
        "055f7d9c632d7370e6fb4afc7468d40f970c34a80d4c6f50ffec63f5a8d536c0",
        "https://ndownloader.figshare.com/files/5976018",
    ),
    "faces/faces45.npz": Origin(
        "a7708e2ac3acb2b747ef555241ecbc657b88eab594e85837c5c9ac435ee3d8f3",
        None,
        "put lfw.tgz (https://ndownloader.figshare.com/files/5976018) in its place; "
        "it is converted when first used",
    ),
    "eeg/S001R03.edf": Origin(
        "3427c8d01bff1380bc9ab9f27a35ece2af5dfadf3e291bbc05eb66e4dadbfe2e", _EEG + "S001R03.edf"
    ),
}


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Hexadecimal digest of a file."""
    state = hashlib.new(algorithm)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder the user names, by argument or by ``QUASIDIAG_DATA``; None means the cache."""
    chosen = data_dir or os.environ.get("QUASIDIAG_DATA")
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist")
    return folder


def checked(path: Path, expected: str, where: str) -> Path:
    """``path``, if its digest is ``expected`` (a SHA-256, or ``md5:...``); else a DataError with the advice ``where``."""
    if not path.is_file():
        raise DataError(f"{path} is missing; get it from: {where}")
    algorithm, _, value = expected.rpartition(":")
    found = digest(path, algorithm or "sha256")
    if found != value:
        raise DataError(
            f"{path} is truncated or altered ({path.stat().st_size:,} bytes, "
            f"{algorithm or 'sha256'} {found[:12]}…, expected {value[:12]}…); get it again from: {where}"
        )
    return path


def original(name: str, folder: Path | None, origins: Mapping[str, Origin] = ORIGINS) -> Path:
    """The path of an original file, checked: in the user's ``folder``, or downloaded once into the cache."""
    origin = origins[name]
    if folder is not None:
        return checked(folder / name, origin.hash, str(origin))
    target = cache_folder() / name
    if target.is_file():
        return checked(target, origin.hash, str(origin))
    return _fetch(target, origin)


def _fetch(target: Path, origin: Origin) -> Path:
    """Download into the cache; pooch checks the hash before the file gets its name."""
    if origin.url is None:
        raise DataError(f"{target} is missing; {origin}")
    try:
        import pooch
    except ModuleNotFoundError:
        raise DataError(
            f"{target} is missing; get it from {origin.url}, or install pooch to have it fetched"
        ) from None
    try:
        pooch.retrieve(
            origin.url,
            known_hash=origin.hash,
            fname=target.name,
            path=target.parent,
            downloader=pooch.HTTPDownloader(timeout=20),
        )
    except Exception as error:  # every transport has its own errors; the user needs the file's name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{target.name} could not be fetched from {origin.url}: {reason}") from None
    return target


def sums(folder: Path) -> dict[str, str]:
    """The digests of the prepared files in a folder, by name."""
    path = folder / SUMS
    if not path.is_file():
        return {}
    pairs = (line.split(maxsplit=1) for line in path.read_text().splitlines() if line.strip())
    return {name: value for value, name in pairs}


def write_sums(folder: Path, entries: Mapping[str, str]) -> None:
    """Record digests of prepared files, atomically, in the format of ``sha256sum``."""
    merged = {**sums(folder), **entries}
    lines = [f"{value}  {name}\n" for name, value in sorted(merged.items())]
    temporary = folder / (SUMS + f".{os.getpid()}")
    temporary.write_text("".join(lines))
    temporary.replace(folder / SUMS)
