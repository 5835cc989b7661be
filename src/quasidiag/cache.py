"""Where compiled kernels and downloaded data are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``QUASIDIAG_CACHE``, else ``quasidiag`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if given := os.environ.get("QUASIDIAG_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quasidiag"
