"""The committed paper-scale results are runs of the experiments as they are now, and all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quasidiag.experiments import tasks
from quasidiag.experiments.export import restore
from quasidiag.experiments.runs import load
from quasidiag.experiments.sweep import Sweep

RESULTS = Path(__file__).parents[2] / "results" / "paper" / "runs.json.gz"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="only in the repository")


def test_every_run_is_named_by_the_config_of_today() -> None:
    for run in load(RESULTS).runs:
        c = run.config
        today = tasks.find(c["experiment"]).config(
            c["variant"],
            c["algorithm"],
            c["lr"],
            seed=c["seed"],
            scale="paper",
            dataset=c["dataset"],
            device="cuda",
        )
        assert today.id == run.id, c


def test_nothing_is_pending_and_three_seeds_are_everywhere(tmp_path: Path) -> None:
    found = restore(RESULTS, tmp_path)
    assert len(found) == len(load(RESULTS).runs)
    for experiment in tasks.EXPERIMENTS:
        sweep = Sweep(experiment, "paper", tmp_path, experiment.dataset, "cuda")
        summary = sweep.summary()
        assert summary["complete"], experiment.name
        assert all(len(cell["runs"]) == 3 for cell in summary["cells"])
        assert not any(cell["edge"] for cell in summary["cells"])
