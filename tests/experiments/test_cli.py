"""The command: exit codes, messages, and that it needs nothing but torch and numpy to train and sweep."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quasidiag
from quasidiag.cli import COMMANDS, main
from quasidiag.experiments import demo, pool
from quasidiag.experiments.algorithms import ALGORITHMS


def test_list_shows_every_experiment(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for word in ("inversion", "Fig. 1", "timing", "Table 1", "mnist-ae", "QDMCNat", "mnist-5k"):
        assert word in out


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert quasidiag.__version__ in capsys.readouterr().out
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert quasidiag.__doc__ in " ".join(out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"quasidiag {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce", "inversoin"], "did you mean 'inversion'"),
        (["run", "mnist", "epcohs=3"], "did you mean 'epochs'"),
        (["run", "mnist", "-a", "QDOP", "epcohs=3"], "did you mean 'epochs'"),
        (["run", "mnist", "--algorithm", "QDMC"], "did you mean 'QDMCNat'"),
        (["run", "mnist", "--variant", "sigmod"], "did you mean 'sigmoid'"),
        (["reproduce", "mnist", "--data-dir", "/nowhere"], "/nowhere does not exist"),
        (["reproduce", "mnist", "--algorithms", "SDG"], "did you mean 'SGD'"),
        (["data", "check", "mnits"], "did you mean 'mnist'"),
        (["report", "/nowhere"], "no runs in /nowhere"),
        (["export", "/nowhere", "out.json.gz"], "no runs in /nowhere"),
        (["demo", "--out", "x.txt"], "unknown kind of picture 'txt'"),
        (["demo", "--out", "/dev/null/x.png"], "/dev/null/x.png: "),
    ],
)
def test_wrong_usage_is_2_with_a_sentence(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_what_argparse_refuses_is_2_too(capsys):
    for words in (
        ["nonsense"],
        ["run"],
        ["run", "mnist", "--colour"],
        ["reproduce", "eeg", "--jobs", "0"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2


def test_data_without_an_action_names_the_actions(capsys):
    with pytest.raises(SystemExit):
        main(["data"])
    assert "required: {check,prepare}" in capsys.readouterr().err


def test_a_missing_data_file_is_2_and_named(tmp_path, capsys):
    assert (
        main(["reproduce", "svhn", "--data-dir", str(tmp_path), "--runs", str(tmp_path / "r")]) == 2
    )
    assert "svhn_gray32.npz is missing" in capsys.readouterr().err


def test_a_dry_run_does_nothing(tmp_path, data_dir, capsys):
    words = ["reproduce", "all", "--scale", "smoke", "--dry-run", "--data-dir", data_dir]
    assert main([*words, "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "200 runs now" in out
    assert "timing" in out
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("words", [["reproduce", "inversion"], ["run", "mnist"], ["race", "ae"]])
def test_a_dry_run_writes_and_fetches_nothing_and_needs_no_device(words, tmp_path, cache, capsys):
    words = [*words, "--dry-run", "--device", "cuda", "--scale", "smoke"]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 0
    assert not list(tmp_path.iterdir())  # nor the cache
    out = capsys.readouterr().out
    assert "mnist, which would be fetched" in out or "dataset=mnist\n" in out


def test_going_on_from_an_export_does_nothing_twice(tmp_path, data_dir, capsys):
    words = ["reproduce", "eeg", "epochs=1", "--scale", "smoke", "--algorithms", "SGD"]
    words += ["--jobs", "1", "--data-dir", data_dir]
    assert main([*words, "--runs", str(tmp_path / "there")]) == 0
    packed = str(tmp_path / "all.json.gz")
    assert main(["export", str(tmp_path / "there"), packed]) == 0
    capsys.readouterr()
    assert main([*words, "--runs", str(tmp_path / "here"), "--from", packed, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"\d+ runs in {packed}\n", out)
    assert "0 runs now" in out
    assert not (tmp_path / "here").exists()
    assert main([*words, "--runs", str(tmp_path / "here"), "--from", packed]) == 0
    assert main([*words, "--runs", str(tmp_path / "here"), "--from", packed, "--dry-run"]) == 0
    assert f"runs in {packed}, all of them here already" in capsys.readouterr().out
    assert main([*words, "--runs", str(tmp_path / "here"), "--from", "nowhere.json.gz"]) == 2
    assert "not an export" in capsys.readouterr().err


def test_run_trains_and_says_where(tmp_path, data_dir, capsys):
    words = ["run", "mnist", "-a", "QDOP", "--scale", "smoke", "layers=784,12,10", "epochs=2"]
    words += ["--runs", str(tmp_path), "--data-dir", data_dir]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "epoch   2" in out
    assert Path(out.splitlines()[-1]).is_dir()
    assert main([*words, "--dry-run", "lr=0.5"]) == 0
    assert "lr=0.5" in capsys.readouterr().out


def test_a_run_that_diverges_is_1(tmp_path, data_dir):
    words = ["run", "mnist", "-a", "SGD", "--scale", "smoke", "layers=784,12,10", "lr=1e30"]
    words += ["--variant", "relu", "--runs", str(tmp_path), "--data-dir", data_dir]
    assert main(words) == 1


def test_a_time_limit_stops_and_a_second_call_goes_on(tmp_path, data_dir, capsys):
    words = ["reproduce", "eeg", "--scale", "smoke", "--algorithms", "SGD", "--jobs", "1"]
    words += ["--runs", str(tmp_path), "--data-dir", data_dir]
    assert main([*words, "--time-limit", "0"]) == 3
    assert "goes on with them" in capsys.readouterr().out
    assert main(words) == 0
    assert main(words) == 0  # nothing left to do


def test_tensorboard_gets_every_epoch(tmp_path, data_dir):
    pytest.importorskip("tensorboard")
    words = ["reproduce", "eeg", "--scale", "smoke", "--algorithms", "SGD", "--jobs", "1"]
    assert main([*words, "--tensorboard", "--runs", str(tmp_path), "--data-dir", data_dir]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = sorted((tmp_path / "tensorboard" / "eeg").iterdir())
    events = EventAccumulator(str(folders[0])).Reload()
    assert [event.step for event in events.Scalars("train/nll")] == [1, 2]


def test_timing_is_measured_in_turns(tmp_path, data_dir, capsys):
    words = ["timing", "--scale", "smoke", "--runs", str(tmp_path), "--data-dir", data_dir]
    assert main(words) == 0
    measured = json.loads((tmp_path / "timing.json").read_text())["cpu"]
    rows = {row["algorithm"]: row for row in measured["rows"]}
    assert rows["SGD"]["ratio"] == 1.0
    assert rows["QDNat"]["paper_ratio"] == pytest.approx(129.76 / 29.10)
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in rows.values())
    assert "QDNat" in capsys.readouterr().out


def test_data_prepare_and_check(tmp_path, data_dir, capsys):
    words = [
        "data",
        "prepare",
        "mnist",
        "eeg",
        "--out",
        str(tmp_path / "p"),
        "--data-dir",
        data_dir,
    ]
    assert main(words) == 0
    assert main(["data", "check", "eeg", "--data-dir", str(tmp_path / "p")]) == 0
    assert main(["data", "check", "svhn", "--data-dir", str(tmp_path / "p")]) == 2
    assert "svhn" in capsys.readouterr().err


def test_the_demo_ends_with_a_table_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "made" / "demo.png"
    assert main(["demo", "--epochs", "1", "--jobs", "1", "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    for name in (*ALGORITHMS, "Riemannian"):
        assert f"\n{name} " in out
    assert "Riemannian untuned: loss" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    counts = [[int(n) for n in found] for found in re.findall(r"\[ *(\d+)/(\d+)\]", out)]
    rounds = [total for number, total in counts if number == 1]
    assert counts == [[k + 1, total] for total in rounds for k in range(total)]
    assert rounds[0] == 25 and out.count("widening the grid: ") == len(rounds) - 1


def test_the_demo_says_that_a_run_diverged(tmp_path):
    search = demo.Search(demo.EXPERIMENT, "small", tmp_path, "mnist-5k", overrides=("epochs=1",))
    outcome = demo.work(
        search.config("sigmoid", "QDMCNat", 100.0).to_dict(), pool.Settings(str(tmp_path))
    )
    assert demo._ending(outcome.config, outcome.result) == "QDMCNat at 100: diverged"


def test_the_demos_picture_covers_no_curve_and_its_ticks_can_be_read():
    pytest.importorskip("matplotlib")
    lines = [{"epoch": k, "train_nll": 2.3 / 10**k, "valid_error": 0.9 / 3**k} for k in range(3)]
    figure = demo._picture(dict.fromkeys((*ALGORITHMS, "Riemannian"), (0.1, lines)))
    figure.draw_without_rendering()
    assert all(axis.get_legend() is None for axis in figure.axes)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "Riemannian, untuned"
    ticks = {text.get_text() for text in figure.axes[1].get_yticklabels()}
    assert {"10", "20", "50"} <= ticks


BARE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from quasidiag.cli import main
raise SystemExit(main(sys.argv[2:]))
"""
EXTRAS = (
    "rich,joblib,matplotlib,pooch,pyedflib,mlxtend,tensorboard,scipy,PIL,dask,distributed,jinja2"
)


def test_sweeping_needs_torch_and_numpy_alone(tmp_path, data_dir):
    """The standard library's process pool takes joblib's place, plain lines that of the bar."""
    words = ["reproduce", "eeg", "timing", "--scale", "smoke", "--algorithms", "SGD,QDOP"]
    words += ["--jobs", "2", "--runs", str(tmp_path), "--data-dir", data_dir]
    script = tmp_path / "bare.py"
    script.write_text(
        BARE.replace("raise SystemExit", "if __name__ == '__main__':\n    raise SystemExit")
    )
    done = subprocess.run(
        [sys.executable, str(script), EXTRAS, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "[1/" in done.stdout
    assert json.loads((tmp_path / "sweeps" / "eeg.json").read_text())["complete"]


def test_a_command_without_its_dependency_says_what_to_install(tmp_path):
    script = tmp_path / "bare.py"
    script.write_text(BARE)
    words = [sys.executable, str(script), EXTRAS]
    done = subprocess.run([*words, "demo"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install mlxtend" in done.stderr
    assert "Traceback" not in done.stderr
