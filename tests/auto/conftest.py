"""Rules of the automatic step that a test looks away from, to see another one alone."""

import math

import pytest

from quasidiag.auto import descent, quadratic, report, rhythm


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers may move by more than their own weights."""
    monkeypatch.setattr(descent, "LONGEST", math.inf)


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric is updated no more often in the first steps than later."""
    monkeypatch.setattr(rhythm, "AT_FIRST", 0)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are as long as those that follow."""
    monkeypatch.setattr(report, "FIRST", 1.0)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a small minibatch are as long as those of a large one."""
    monkeypatch.setattr(descent, "FULL", 1)
    monkeypatch.setattr(descent, "EACH", 0)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken at their word, however much they promise."""
    monkeypatch.setattr(quadratic, "TRIALS", 0)
