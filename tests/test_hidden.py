"""Functions that a compiler goes around, and that cost nothing where there is none."""

from __future__ import annotations

import traceback
import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from quasidiag import hidden as module
from quasidiag.hidden import hidden


def test_it_is_the_function_where_nobody_compiles() -> None:
    @hidden
    def called(x: int, *, y: int = 0) -> list[str]:
        """What it does."""
        assert (x, y) == (1, 2)
        return [frame.filename for frame in traceback.extract_stack()]

    assert not [name for name in called(1, y=2) if "_dynamo" in name or "_compile.py" in name]
    assert (called.__name__, called.__doc__) == ("called", "What it does.")


@pytest.mark.parametrize("skipped", [True, False], ids=["skipped", "an older torch"])
def test_a_compiler_goes_around_it_and_around_what_it_calls(
    skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not skipped:
        monkeypatch.setattr(module, "_skipped", lambda function: False)
    seen: list[tuple[bool, float]] = []

    def inner(x: Tensor) -> Tensor:
        return x.sin().cos()  # two operations that no graph may have

    @hidden
    def around(x: Tensor) -> None:
        seen.append((torch.compiler.is_compiling(), float(inner(x))))

    def model(x: Tensor) -> Tensor:
        x = x + 1
        around(x)
        return x * 2

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (0.0, 1.0):
            assert compiled(torch.tensor(value)) == 2 * value + 2
    assert seen == [(False, pytest.approx(float(inner(torch.tensor(v))))) for v in (1.0, 2.0)]
    assert (counter.frame_count, counter.op_count) == (2, 2)
    torch._dynamo.reset()
