"""Sweeps: the grid grows where its best is at an end, every experiment runs, a killed sweep goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quasidiag.experiments import pool, tasks
from quasidiag.experiments.runs import load
from quasidiag.experiments.sweep import Sweep, best_of, edge_of, interleaved

TINY = ("layers=784,12,10", "epochs=2")


def sweep(root, **values) -> Sweep:
    experiment = replace(tasks.find("mnist"), variants=tasks.SIGMOID, **values)
    return Sweep(experiment, "smoke", str(root), "mnist", "cpu", TINY, ("SGD", "QDOP"))


def finish(s: Sweep, data_dir: str) -> list[int]:
    """Round after round; how many runs each had."""
    rounds = []
    while configs := interleaved([s]):
        rounds.append(len(configs))
        outcomes = list(pool.run_all(configs, pool.Settings(str(s.root), data_dir)))
        assert all(outcome.error is None for outcome in outcomes)
        assert len(rounds) < 20
    return rounds


def numbers(root) -> dict[str, list[dict]]:
    """The metrics of all runs without the time."""
    return {
        run.id: [{k: v for k, v in line.items() if k != "seconds"} for line in run.metrics]
        for run in load(root).runs
    }


def test_the_grid_grows_where_the_best_is_at_an_end(tmp_path, data_dir):
    s = sweep(tmp_path)
    assert s.lrs("sigmoid", "SGD") == [0.01, 0.1]
    rounds = finish(s, data_dir)
    assert rounds[0] == 4
    assert len(rounds) > 1
    summary = s.write_summary()
    assert summary["complete"]
    for cell in summary["cells"]:
        tried = {
            entry["lr"]: entry["value"] for entry in cell["lrs"] if entry["status"] == "finished"
        }
        assert cell["best_lr"] == min(tried, key=tried.get)
        assert cell["final"]["train_nll"]["mean"] == min(tried.values())
        lrs = [entry["lr"] for entry in cell["lrs"]]
        assert len(lrs) > 2 or cell["edge"] is None
        assert cell["edge"] == edge_of(lrs, cell["best_lr"])
    assert load(tmp_path).sweeps["mnist"] == summary
    assert s.pending() == []


def test_the_best_step_size_is_repeated_on_every_seed(tmp_path, data_dir, monkeypatch):
    scale = replace(tasks.find("mnist").scale("smoke"), seeds=(0, 1, 2), extend=0)
    monkeypatch.setattr(tasks.Experiment, "scale", lambda self, name: scale)
    s = sweep(tmp_path)
    assert finish(s, data_dir) == [4, 4]
    for cell in s.summary()["cells"]:
        assert len(cell["runs"]) == 3
        assert len(set(cell["final"]["train_nll"]["values"])) == 3


def test_a_step_size_tried_on_one_variant_is_tried_on_all(tmp_path, data_dir):
    experiment = tasks.find("inversion")
    s = Sweep(experiment, "smoke", str(tmp_path), "mnist", "cpu", TINY, ("SGD", "QDOP"))
    finish(s, data_dir)
    cells = {(cell["variant"], cell["algorithm"]): cell for cell in s.summary()["cells"]}
    for algorithm in ("SGD", "QDOP"):
        original, inverted = cells["original", algorithm], cells["inverted", algorithm]
        assert [e["lr"] for e in original["lrs"]] == [e["lr"] for e in inverted["lrs"]]
    quasi = [cells[v, "QDOP"]["final"]["train_nll"]["mean"] for v in ("original", "inverted")]
    plain = [cells[v, "SGD"]["final"]["train_nll"]["mean"] for v in ("original", "inverted")]
    assert abs(quasi[0] - quasi[1]) < 0.1 * abs(plain[0] - plain[1])


def test_when_all_diverge_smaller_step_sizes_are_tried():
    assert best_of({0.1: float("inf")}) is None
    assert best_of({0.1: 2.0, 1.0: float("inf"), 0.01: 3.0}) == 0.1
    assert edge_of([0.1, 1.0], 1.0) == "high"
    assert edge_of([0.1, 1.0], 0.1) == "low"
    assert edge_of([0.01, 0.1, 1.0], 0.1) is None


@pytest.mark.parametrize("jobs", [2])
def test_parallel_runs_have_the_numbers_of_serial_ones(tmp_path, data_dir, jobs):
    configs = sweep(tmp_path).pending()
    for name, count in (("serial", 1), ("parallel", jobs)):
        settings = pool.Settings(str(tmp_path / name), data_dir)
        assert len(list(pool.run_all(configs, settings, count))) == len(configs)
    assert numbers(tmp_path / "serial") == numbers(tmp_path / "parallel")


def test_a_broken_run_does_not_take_the_others_along(tmp_path, data_dir):
    good, *_ = sweep(tmp_path).pending()
    bad = replace(good, layers=(100, 10))
    outcomes = list(pool.run_all([bad, good], pool.Settings(str(tmp_path), data_dir)))
    assert "784 inputs, the network 100" in outcomes[0].error
    assert outcomes[1].result["status"] == "finished"


def test_a_sweep_killed_with_all_its_workers_goes_on_to_the_same_numbers(tmp_path, data_dir):
    from quasidiag.cli import main

    words = ["reproduce", "eeg", "--scale", "smoke", "--algorithms", "SGD,QDMCNat", "epochs=25"]
    words += ["--checkpoint-seconds", "0", "--data-dir", data_dir]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, "-m", "quasidiag", *words, "--jobs", "2", "--runs", str(killed)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(list(killed.glob("runs/*/result.json"))) < 1:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in killed.glob("runs/*/result.json")}
    for root in (killed, whole):
        assert main([*words, "--jobs", "1", "--runs", str(root)]) == 0
    assert numbers(killed) == numbers(whole)
    assert len(finished) < len(numbers(whole))
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())
    summaries = [json.loads((root / "sweeps" / "eeg.json").read_text()) for root in (killed, whole)]
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize("name", tasks.BY_NAME)
def test_every_experiment_at_smoke_scale(tmp_path, data_dir, name, capsys):
    """From the command to the summary, one variant at least, with the network of the paper."""
    from quasidiag.cli import main

    words = ["reproduce", name, "--scale", "smoke", "--jobs", "1", "--algorithms", "SGD,QDMCNat"]
    words += ["--runs", str(tmp_path), "--data-dir", data_dir, "epochs=1"]
    assert main(words) == 0
    summary = json.loads((tmp_path / "sweeps" / f"{name}.json").read_text())
    assert summary["complete"]
    assert {cell["variant"] for cell in summary["cells"]} == set(tasks.find(name).variants)
    assert all(
        cell["best_lr"] is not None for cell in summary["cells"] if cell["algorithm"] == "SGD"
    )
    assert summary["paper"] in capsys.readouterr().out


def test_all_eight_algorithms_on_a_small_network(tmp_path, data_dir):
    from quasidiag.cli import main

    words = ["reproduce", "eeg", "--scale", "smoke", "--jobs", "1", "--runs", str(tmp_path)]
    assert main([*words, "--data-dir", data_dir]) == 0
    cells = json.loads((tmp_path / "sweeps" / "eeg.json").read_text())["cells"]
    assert [cell["algorithm"] for cell in cells] == list(tasks.ALGORITHMS)


def test_real_data_at_smoke_scale(tmp_path, real_data):
    from quasidiag.cli import main

    words = ["inversion", "svhn", "faces", "eeg", "--scale", "smoke", "--jobs", "1", "epochs=1"]
    words += ["--algorithms", "SGD", "--runs", str(tmp_path), "--data-dir", str(real_data)]
    assert main(["reproduce", *words]) == 0
    assert {path.stem for path in Path(tmp_path).glob("sweeps/*.json")} == set(words[:4])
