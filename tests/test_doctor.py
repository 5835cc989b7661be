"""``quasidiag doctor``: what would be preconditioned, what not, and why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quasidiag.cli import main
from quasidiag.doctor import examine

SCRIPT = """
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        import torch
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.scale * x

model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Scale(), nn.Linear(4, 2, bias=False))

def sound():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))

def needy(width):
    return nn.Linear(width, 1)

def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))

def frozen():
    return nn.Linear(3, 4).requires_grad_(False)

def tuned():
    return nn.Sequential(frozen(), nn.Linear(4, 2))

number = 3

def broken():
    raise ValueError("no such\\nconfiguration")

def mistyped():
    return nn.Linear("3", 1)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_names_what_is_not_preconditioned(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(script)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines[:3]] == ["yes", "yes", "NO "]
    assert "quasi-diagonal, by LinearAdapter" in lines[0]
    assert "no bias is trained" in lines[1]
    assert "2.scale" in lines[2] and "no adapter is registered for Scale" in lines[2]
    assert lines[3] == "24 of 28 parameters are preconditioned (85.7%)"


def test_a_sound_model_exits_with_zero(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{script}:sound"]) == 0
    assert "100.0%" in capsys.readouterr().out


def test_frozen_parameters_are_said_to_be_and_not_counted(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", f"{script}:tuned"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines[:2]] == ["yes", "-  "] and "frozen" in lines[1]
    assert lines[2] == "10 of 10 parameters are preconditioned (100.0%); 16 more are frozen"


def test_by_import_path(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["doctor", "script:sound"]) == 0
    assert main(["doctor", "script:model"]) == 1


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("missing.py", "there is no file"),
        ("torch.nn", "expected package.module:name"),
        ("no_such_package:model", "cannot import"),
        ("{}:nothing", "defines no 'nothing'"),
        ("{}:number", "is a int, not a module"),
        ("{}:needy", "cannot be called without arguments"),
        ("torch.nn:Identity", "has no parameter"),
        ("{}:lazy", "lazy layers (0.weight, 0.bias), which have no shape yet"),
        ("{}:frozen", "are frozen: nothing is trained"),
        ("{}:broken", "ValueError: no such (line 33)"),
        ("{}:mistyped", "TypeError: empty(): argument 'size'"),
    ],
)
def test_wrong_usage(
    place: str, message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", place.format(script)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 1 / 0", "ZeroDivisionError: division by zero (line 1)"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 (line 2)"),
        ("import no_such_package", "cannot import"),
    ],
)
def test_a_script_that_fails(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no model of which some falls to the diagonal rule."""
    path = tmp_path / "script.py"
    path.write_text(text)
    assert main(["doctor", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("here", [False, True])
def test_a_script_imports_from_its_own_folder(
    here: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As when Python runs it; also what it imports only when the model is made."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "sibling_of_script.py").write_text("width = 3")
    (folder / "second_sibling.py").write_text("from torch import nn\nlayer = nn.Linear")
    script = folder / "script.py"
    script.write_text(
        "from sibling_of_script import width\n"
        "def make():\n    from second_sibling import layer\n    return layer(width, 2)"
    )
    if here:
        monkeypatch.chdir(folder)
    before = [*sys.path]
    assert main(["doctor", f"{'script.py' if here else script}:make"]) == 0
    assert "8 of 8" in capsys.readouterr().out and sys.path == before
    for name in ("sibling_of_script", "second_sibling"):
        del sys.modules[name]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, bias=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.cls = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.attention(x, x, x)[0]) + self.cls


def test_composite_frozen_and_loose_parameters() -> None:
    found = {finding.name: finding for finding in examine(Tied())}
    frozen = found["frozen.weight, frozen.bias"]
    assert frozen.good is None and "frozen" in frozen.why
    assert not found["cls"].good and "Tied" in found["cls"].why
    total = sum(finding.parameters for finding in found.values())
    assert total == sum(p.numel() for p in Tied().parameters())
    assert all(finding.good for name, finding in found.items() if name.startswith("attention"))


def test_layers_inside_of_others_and_parametrizations_by_the_names_that_people_know() -> None:
    model = nn.Sequential(nn.LSTM(3, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    found = {finding.name: finding for finding in examine(model)}
    assert found["0.ih_l0"].layer == "LSTM"
    (hidden,) = (finding for finding in found.values() if not finding.good)
    assert hidden.layer == "ParametrizationList" and "weight_norm" in hidden.why
    alone = {finding.layer for finding in examine(nn.MultiheadAttention(4, 2, kdim=3, vdim=3))}
    assert "MultiheadAttention" in alone and not alone & {"Part", "BiasPart"}
