"""Runs on disk: killed at any moment, they go on to the same numbers; divergence is a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from quasidiag.experiments import tasks
from quasidiag.experiments.config import Config, UsageError
from quasidiag.experiments.execute import execute
from quasidiag.experiments.export import export, restore
from quasidiag.experiments.runs import RunDir, load, read_metrics
from quasidiag.experiments.sweep import Sweep


def config(algorithm: str = "QDMCNat", lr: float = 1e-3, **values) -> Config:
    base = tasks.find("inversion").config("original", algorithm, lr, scale="smoke")
    return Config.from_dict({**base.to_dict(), "layers": [784, 16, 10], **values})


def numbers(store: RunDir) -> list[dict]:
    """The metrics without the time."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in store.metrics()]


def test_a_run_leaves_its_whole_story(tmp_path, data_dir):
    c = config()
    result = execute(c, tmp_path, data_dir=data_dir)
    path = tmp_path / "runs" / c.id
    assert sorted(p.name for p in path.iterdir() if not p.name.startswith(".")) == [
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "result.json",
    ]
    assert Config.from_dict(json.loads((path / "config.json").read_text())) == c
    assert [line["epoch"] for line in RunDir(tmp_path, c).metrics()] == [0, 1, 2]
    assert result["status"] == "finished"
    assert result["final"]["train_nll"] < result["initial"]["train_nll"]
    assert json.loads((path / "environment.json").read_text())["data"] == "a stand-in"


def test_a_finished_run_is_not_done_again(tmp_path, data_dir):
    c = config()
    first = execute(c, tmp_path, data_dir=data_dir)
    assert execute(c, tmp_path, data_dir="/does/not/exist") == first


@pytest.mark.parametrize("algorithm", ["SGD", "AdaGrad", "QDMCNat", "QDNat"])
def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path, data_dir, algorithm):
    """With dropout and Monte Carlo: every random state is in the checkpoint."""
    c = config(algorithm, epochs=4, dropout=0.3)
    execute(c, tmp_path / "whole", data_dir=data_dir)
    whole = RunDir(tmp_path / "whole", c)
    part = RunDir(tmp_path / "part", c)
    calls = 0
    while part.result is None:
        # The deadline passes during the first epoch of each call.
        execute(c, tmp_path / "part", data_dir=data_dir, deadline=time.time() + 0.001)
        calls += 1
        assert calls < 100
    assert calls >= 4
    assert numbers(part) == numbers(whole)
    assert not (part.path / "checkpoint.pt").exists()


KILLED = """
import sys
from quasidiag.experiments.config import Config
from quasidiag.experiments.execute import execute
import json, torch
torch.set_num_threads(1)
c = Config.from_dict(json.loads(sys.argv[1]))
execute(c, sys.argv[2], data_dir=sys.argv[3], checkpoint_seconds=0.0)
"""


def test_kill_9_loses_nothing(tmp_path, data_dir):
    c = config(epochs=60, dropout=0.3)
    arguments = [json.dumps(c.to_dict()), str(tmp_path / "killed"), data_dir]
    process = subprocess.Popen([sys.executable, "-c", KILLED, *arguments])
    store = RunDir(tmp_path / "killed", c)
    while len(store.metrics()) < 5:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert store.result is None
    before = len(store.metrics())
    # As if the kill had come in the middle of a line.
    with (store.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 7, "train_n')
    execute(c, tmp_path / "killed", data_dir=data_dir)
    execute(c, tmp_path / "whole", data_dir=data_dir)
    assert before >= 5
    assert numbers(store) == numbers(RunDir(tmp_path / "whole", c))
    assert not list(store.path.glob(".*.[0-9]*"))


def test_divergence_is_a_result(tmp_path, data_dir):
    for algorithm, lr in (("SGD", 1e30), ("QDOP", 1e20)):
        c = config(algorithm, lr, activation="relu")
        result = execute(c, tmp_path, data_dir=data_dir)
        assert result["status"] == "diverged"
        assert result["reason"] in ("non-finite", "worse than the start")
        json.dumps(result, allow_nan=False)


def test_autoencoders_keep_pictures_and_both_errors(tmp_path, data_dir):
    c = tasks.find("mnist-ae").config("sigmoid", "QDMCNat", 1e-4, scale="smoke")
    c = Config.from_dict({**c.to_dict(), "layers": [784, 8, 784]})
    result = execute(c, tmp_path, data_dir=data_dir)
    final = result["final"]
    assert final["valid_mse"] == pytest.approx(2 * final["valid_error"] / 784)
    (run,) = load(tmp_path).runs
    pictures = run.pictures
    assert pictures["original"].shape == pictures["reconstruction"].shape == (10, 28, 28)


def test_an_export_holds_the_same(tmp_path, data_dir):
    c = tasks.find("faces").config("sigmoid", "SGD", 1e-4, scale="smoke")
    execute(
        Config.from_dict({**c.to_dict(), "layers": [2025, 4, 2025]}),
        tmp_path / "runs",
        data_dir=data_dir,
    )
    execute(config(), tmp_path / "runs", data_dir=data_dir)
    assert export(tmp_path / "runs", tmp_path / "all.json.gz") == 2
    for one, other in zip(load(tmp_path / "runs").runs, load(tmp_path / "all.json.gz").runs):
        assert one.id == other.id
        assert one.config == other.config
        assert one.result == other.result
        for a, b in zip(one.metrics, other.metrics):
            assert a == pytest.approx(b, rel=1e-5)
        if one.pictures is not None:
            assert (one.pictures["original"] == other.pictures["original"]).all()
    (tmp_path / "bad.json.gz").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="not an export"):
        load(tmp_path / "bad.json.gz")
    with pytest.raises(UsageError, match="no runs"):
        load(tmp_path / "nowhere")


def test_an_export_can_be_gone_on_from(tmp_path, data_dir, capsys):
    """Ended runs are not done again; what was cut off, and what is already there, is left alone."""
    done, cut = config(), config(epochs=6)
    picture = tasks.find("mnist-ae").config("sigmoid", "SGD", 1e-4, scale="smoke")
    picture = Config.from_dict({**picture.to_dict(), "layers": [784, 4, 784]})
    for c in (done, picture):
        execute(c, tmp_path / "there", data_dir=data_dir)
    execute(cut, tmp_path / "there", data_dir=data_dir, deadline=time.time() + 0.001)
    export(tmp_path / "there", tmp_path / "all.json.gz")
    here = tmp_path / "here"
    packed = tmp_path / "all.json.gz"
    assert set(restore(packed, here, dry_run=True)) == {done.id, picture.id}
    assert not here.exists()
    restore(packed, here)
    restore(packed, here)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == second == f"2 runs in {packed}"
    assert third == f"2 runs in {packed}, all of them here already"
    for c in (done, picture):
        there = RunDir(tmp_path / "there", c)
        assert execute(c, here, data_dir="/does/not/exist") == there.result
        for a, b in zip(RunDir(here, c).metrics(), there.metrics(), strict=True):
            assert a == pytest.approx(b, rel=1e-5)
    assert RunDir(here, cut).result is None
    made, restored = (
        next(run.pictures for run in load(tmp_path / name).runs if run.id == picture.id)
        for name in ("there", "here")
    )
    assert (made["reconstruction"] == restored["reconstruction"]).all()


def test_an_export_of_a_sweep_has_the_pictures_that_a_report_shows(tmp_path, data_dir):
    sweep = Sweep(
        tasks.find("mnist-ae"), "smoke", tmp_path, "mnist", overrides=("layers=784,4,784",)
    )
    for lr in sweep.lrs("sigmoid", "SGD"):
        execute(sweep.config("sigmoid", "SGD", lr), tmp_path, data_dir=data_dir)
    sweep.write_summary()
    export(tmp_path, tmp_path / "all.json.gz")
    best = min(load(tmp_path).runs, key=lambda run: run.result["final"]["train_nll"])
    kept = [run.id for run in load(tmp_path / "all.json.gz").runs if run.pictures]
    assert kept == [best.id]


def test_metrics_survive_torn_and_repeated_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 0, "a": 1}\n{"epoch": 1, "a": 2}\n{"epo\n{"epoch": 1, "a": 3}\n{"ep')
    assert read_metrics(path) == [{"epoch": 0, "a": 1}, {"epoch": 1, "a": 3}]


def test_the_name_of_a_run_is_its_config():
    assert config().id == config().id
    assert config().id != config(seed=1).id
    assert len(config().id) == 16


def test_overrides_have_the_types_of_their_keys():
    c = config().override(
        ["lr=1e-2", "epochs=3", "layers=784,20,10", "inverted=true", "train_size=none", "floor=0"]
    )
    assert (c.lr, c.epochs, c.layers, c.inverted) == (0.01, 3, (784, 20, 10), True)
    assert c.train_size is None
    assert c.floor == 0.0
    for wrong, message in {
        "epcohs=3": "did you mean 'epochs'",
        "epochs=many": "expected a value of type int",
        "epochs=1.5": "expected a value of type int",
        "epochs": "key=value",
    }.items():
        with pytest.raises(UsageError, match=message):
            config().override([wrong])
