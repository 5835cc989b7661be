from __future__ import annotations

import pytest

from quasidiag.kernels import native


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which compiled functions were called."""
    found: list[str] = []
    real = native._call

    def counted(name: str, *arguments: object) -> int:
        found.append(name)
        return real(name, *arguments)

    monkeypatch.setattr(native, "_call", counted)
    return found
