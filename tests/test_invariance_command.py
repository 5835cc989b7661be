"""``quasidiag invariance``: the table, the picture, optimizers by import path, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import quasidiag as qd
from quasidiag import invariance, invariance_command
from quasidiag.cli import main

ONLY = ["invariance", "--only", "--steps", "5", "--optimizer"]


def test_an_invariant_and_a_dependent_optimizer(tmp_path: Path) -> None:
    numbers = tmp_path / "made" / "numbers.json"
    riemannian = [
        *ONLY,
        "quasidiag:QDOP",
        "lr=0.01",
        "eps=0.0",
        "floor=0.0",
        "--json",
        str(numbers),
    ]
    assert main([*riemannian, "--require", "affine"]) == 0
    assert max(json.loads(numbers.read_text())["quasidiag:QDOP"].values()) < 1e-9
    adam = [*ONLY, "torch.optim:Adam", "lr=0.01", "--json", str(numbers)]
    assert main(adam) == 0
    assert min(json.loads(numbers.read_text())["torch.optim:Adam"].values()) > 1e-3
    assert main([*adam, "--require", "rescaling"]) == 1


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    table = {
        "one": dict.fromkeys(invariance.CHANGES, 1e-12),
        "two": dict.fromkeys(invariance.CHANGES, float("nan")),
    }
    invariance_command.show(table)
    lines = capsys.readouterr().out.splitlines()
    assert all(change in lines[-4] for change in invariance.CHANGES)
    assert lines[-2].count("1e-12 kept") == 4 and lines[-1].count("failed") == 4


def test_the_table_says_what_is_not_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    few = {name: invariance_command.OPTIMIZERS[name] for name in ("SGD", "Adam", "QDOP")}
    monkeypatch.setattr(invariance_command, "OPTIMIZERS", few)
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert main(["invariance", "--steps", "2", "--plot", str(path)]) == 0
    said = "not by default: gamma=0.05, eps=0, floor=0 (DOP, DNat, QDOP, QDMCNat, QDNat); lr=0.1"
    assert said in capsys.readouterr().out and said in path.read_text()
    assert path.read_text().count(">not invariant<") == 1  # a name for what lies on each other
    assert main([*ONLY, "torch.optim:SGD", "lr=0.1"]) == 0
    assert "by default" not in capsys.readouterr().out
    group = few["QDOP"](invariance_command.problem(0)[0], qd.Categorical()).param_groups[0]
    assert {key: group[key] for key in invariance_command.PAPERS} == invariance_command.PAPERS


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "made" / "picture.png"
    assert main([*ONLY, "torch.optim:SGD", "lr=0.1", "--plot", str(path)]) == 0
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000


def test_what_does_not_train_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONLY, "torch.optim:SGD", "lr=0.0"]) == 1
    assert "did not train: torch.optim:SGD" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ONLY, "torch.optim:Nothing"], "cannot import"),
        ([*ONLY, "no_such_package:Adam"], "cannot import"),
        ([*ONLY, "torch.optim"], "expected MODULE:CLASS"),
        ([*ONLY, "torch.nn:Linear"], "not a torch.optim.Optimizer"),
        ([*ONLY, "torch.optim:SGD", "speed=1"], "cannot be made with these options"),
        ([*ONLY, "torch.optim:LBFGS"], "torch.optim:LBFGS fails: TypeError"),
        (["invariance", "--only"], "about an --optimizer"),
        (["invariance", "--steps", "0"], "at least 1"),
        (["invariance", "--plot", "x.foo"], "unknown kind of picture 'foo'"),
        (["invariance", "--json", "/dev/null/x.json"], "/dev/null/x.json: "),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(invariance_command, "OPTIMIZERS", {})  # no time for those
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_optimizer_in_the_working_directory(tmp_path: Path) -> None:
    """Of the installed command, which does not look there by itself."""
    (tmp_path / "of_mine.py").write_text("from torch.optim import SGD as Mine")
    command = Path(sys.executable).with_name("quasidiag")
    arguments = [*ONLY, "of_mine:Mine", "lr=0.1", "--steps", "2"]
    done = subprocess.run([command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "of_mine:Mine" in done.stdout


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("QDOP", set(invariance.CHANGES)),
        ("QDNat", set(invariance.CHANGES)),
        ("DNat", {"rescaling"}),
        ("Adam", set()),
        ("Riemannian (auto)", {"inversion", "sigmoid to tanh"}),
        ("Riemannian (auto, no safeguards)", set(invariance.CHANGES)),
    ],
)
def test_who_keeps_what(name: str, kept: set[str]) -> None:
    """Safeguards break the invariance to rescaling, and no other."""
    make = invariance_command.OPTIMIZERS[name]
    drifts = {c: invariance_command.measure(make, c, 20, 0) for c in invariance.CHANGES}
    found = {c for c, drift in drifts.items() if invariance_command.relative(drift) < 1e-8}
    assert found == kept


def test_a_riemannian_subclass_is_given_the_model() -> None:
    make = invariance_command.given("quasidiag:DNat", {"lr": 0.5})
    model, *_ = invariance_command.problem(0)
    optimizer = make(model, qd.Categorical())
    assert isinstance(optimizer, qd.DNat) and optimizer.param_groups[0]["lr"] == 0.5
