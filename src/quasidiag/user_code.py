"""Code of users that a command runs: where it is imported from, and how it is blamed."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from quasidiag.experiments.config import UsageError


@contextmanager
def found_from(path: str) -> Iterator[None]:
    """Import modules from the working directory too, and first from the folder of a file, as when Python runs it."""
    before = sys.path
    beside = [os.path.dirname(os.path.abspath(path))] if path.endswith(".py") else []
    sys.path = [*beside, os.getcwd(), *before]
    try:
        yield
    finally:
        sys.path = before


@contextmanager
def blamed(path: str) -> Iterator[None]:
    """Report an error in the user's code as a usage error of one line."""
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        raise UsageError(f"cannot import {path!r}: {error}") from error
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f" (line {lines[-1]})" if lines else ""
        said = next(iter(str(error).splitlines()), "")
        raise UsageError(f"{path} fails: {type(error).__name__}: {said}{where}") from error
