"""The example that builds QDOP from the paper's two routines gives the library's QDOP."""

import runpy
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "qdop_from_scratch.py"


def test_the_handmade_qdop_is_the_library_s() -> None:
    example = runpy.run_path(str(EXAMPLE))
    (mine, ours), (theirs, others) = example["by_hand"](6), example["by_library"](6)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(others), rtol=1e-7, atol=0)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)
