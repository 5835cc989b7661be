"""A sweep on a real Dask cluster: a scheduler and two workers, one of which is killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("distributed")

from quasidiag.cli import main
from quasidiag.experiments import tasks
from quasidiag.experiments.pool import Settings, run_all
from quasidiag.experiments.runs import RunDir


@pytest.fixture
def cluster(tmp_path: Path):
    """The scheduler's address and the workers' processes."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
    }
    log = (tmp_path / "dask.log").open("w")
    processes: list[subprocess.Popen] = []

    def start(*words: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "distributed.cli." + words[0], *words[1:]],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            cwd=tmp_path,
        )
        processes.append(process)
        return process

    file = tmp_path / "scheduler.json"
    words = ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", ":0"]
    start("dask_scheduler", *words, "--scheduler-file", str(file))
    workers = [
        start("dask_worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-dashboard")
        for _ in range(2)
    ]
    from distributed import Client

    while not file.exists():
        time.sleep(0.05)
    with Client(scheduler_file=str(file), timeout=60) as client:
        client.wait_for_workers(2, timeout=120)
        address = client.scheduler.address
    yield address, workers
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log.close()


def test_a_killed_worker_does_not_change_the_numbers(tmp_path, data_dir, cluster):
    address, workers = cluster
    base = tasks.find("mnist").config("sigmoid", "QDMCNat", 1e-3, scale="smoke")
    configs = [
        base.override(["layers=784,12,10", "epochs=40", "dropout=0.2", f"seed={seed}"])
        for seed in range(6)
    ]
    settings = Settings(str(tmp_path / "dask"), data_dir, checkpoint_seconds=0.0)
    outcomes = []
    for outcome in run_all(configs, settings, dask=address):
        outcomes.append(outcome)
        if len(outcomes) == 1:
            os.killpg(workers[0].pid, signal.SIGKILL)
    assert workers[0].wait() == -signal.SIGKILL
    assert [outcome.error for outcome in outcomes] == [None] * len(configs)
    assert {outcome.config.id for outcome in outcomes} == {config.id for config in configs}

    def numbers(root: Path, config) -> list:
        lines = RunDir(root, config).metrics()
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]

    list(run_all(configs, Settings(str(tmp_path / "here"), data_dir)))
    for config in configs:
        assert numbers(tmp_path / "dask", config) == numbers(tmp_path / "here", config)


def test_the_command_takes_an_address(tmp_path, data_dir, cluster):
    address, _ = cluster
    words = ["reproduce", "eeg", "--scale", "smoke", "--algorithms", "SGD,QDOP", "--dask", address]
    assert main([*words, "--runs", str(tmp_path / "runs"), "--data-dir", data_dir]) == 0


def test_no_scheduler_is_an_error_of_usage(tmp_path, data_dir, capsys):
    words = ["reproduce", "eeg", "--scale", "smoke", "--dask", "tcp://127.0.0.1:9"]
    assert main([*words, "--runs", str(tmp_path), "--data-dir", data_dir]) == 2
    assert "no Dask scheduler at tcp://127.0.0.1:9" in capsys.readouterr().err
