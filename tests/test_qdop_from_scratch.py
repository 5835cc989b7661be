"""The example that builds QDOP from the paper's two routines runs, and is QDOP."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "qdop_from_scratch.py"


def test_the_handmade_qdop_is_the_library_s() -> None:
    assert runpy.run_path(str(EXAMPLE))["main"](steps=10) < 1e-6
