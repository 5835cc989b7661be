"""From training to the page: real runs of the real bench, as a folder and as an export."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from quasidiag.cli import main
from quasidiag.experiments.execute import execute
from quasidiag.experiments.report import render, write
from quasidiag.experiments.report_runs import lines, records
from quasidiag.experiments.runs import load
from quasidiag.experiments.tasks import find

RUNS = (
    ("inversion", "original", "SGD", 1e-1),
    ("inversion", "inverted", "SGD", 1e-1),
    ("inversion", "original", "QDOP", 1e-3),
    ("inversion", "original", "QDOP", 1e6),
    ("mnist-ae", "sigmoid", "QDOP", 1e-3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    for experiment, variant, algorithm, lr in RUNS:
        known = find(experiment)
        config = known.config(variant, algorithm, lr, scale="smoke", dataset="mnist-5k")
        execute(config, root)
    return root


@pytest.fixture(scope="module")
def page(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    assert main(["report", str(folder), "--out", str(out)]) == 0
    return out / "report.html"


def test_page_and_figures_are_written(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "5 runs · 1 diverged" in text.replace(" &middot; ", " · ")
    assert "mnist-5k" in text
    assert "reconstructions by QDOP" in text
    assert text.count('aria-label="diverged"') == 1
    names = {path.name for path in (page.parent / "figures").iterdir()}
    stems = {"inversion-nll", "inversion-error", "inversion-steps", "mnist-ae-nll"}
    stems |= {"mnist-ae-error", "mnist-ae-steps", "mnist-ae-pictures"}
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "pdf", "csv")}


def test_csv_holds_what_the_runs_measured(folder: Path, page: Path) -> None:
    with (page.parent / "figures" / "inversion-nll.csv").open(encoding="utf-8") as file:
        written = [row for row in csv.DictReader(file) if row["algorithm"] == "QDOP"]
    (line,) = [
        line
        for line in lines(records(load(folder)))
        if (line.task.variant, line.algorithm) == ("original", "QDOP")
    ]
    measured = line.at(1e-3)[0].column("train_nll")
    assert [float(row["train_nll"]) for row in written] == pytest.approx(measured, rel=1e-5)


def test_an_export_gives_the_same_page(folder: Path, page: Path, tmp_path: Path) -> None:
    packed = tmp_path / "runs.json.gz"
    assert main(["export", str(folder), str(packed)]) == 0
    assert render(records(load(packed)), {}) == page.read_text(encoding="utf-8")


def test_the_largest_scale_stands_for_an_experiment(folder: Path) -> None:
    known = find("inversion")
    smoke = known.config("original", "SGD", 1e-1, scale="smoke", dataset="mnist-5k")
    longer = smoke.override(["scale=small", "epochs=3"])
    execute(longer, folder)
    found = [
        record
        for record in records(load(folder))
        if (record.task.variant, record.algorithm) == ("original", "SGD")
    ]
    assert [(record.config["scale"], record.epochs) for record in found] == [("small", 3)]


def test_unfinished_runs_are_counted_and_left_out(tmp_path: Path) -> None:
    config = find("inversion").config("inverted", "QDOP", 1e-3, scale="smoke", dataset="mnist-5k")

    def interrupt(line: dict[str, object]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(config, tmp_path, on_epoch=interrupt)
    page = write(tmp_path, tmp_path / "report").read_text(encoding="utf-8")
    assert "1 unfinished, left out" in page
    assert "no finished runs" in page
    assert not list((tmp_path / "report" / "figures").iterdir())
