"""Figures: one PNG, PDF and CSV each, whose numbers are the runs' own."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from synthetic import grid, pictures, record, timing

from quasidiag.experiments import figures
from quasidiag.experiments.algorithms import ALGORITHMS
from quasidiag.experiments.report_page import NLL
from quasidiag.experiments.report_runs import lines


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_figure_has_its_three_files(tmp_path: Path) -> None:
    runs = [
        *grid({1e-2: 0.2, 1e-1: None}),
        record("faces", algorithm="QDOP", output="gaussian", pictures=pictures(3)),
    ]
    written = figures.write(runs, timing(), tmp_path)
    names = {"mnist-nll", "mnist-error", "mnist-steps", "faces-error", "faces-steps"}
    names |= {"faces-pictures", "timing-cpu"}
    assert {path.name for path in written} == {
        f"{name}.{kind}" for name in names for kind in ("png", "pdf", "csv")
    }
    for path in written:
        start = path.read_bytes()[:4]
        assert start == {".png": b"\x89PNG", ".pdf": b"%PDF"}.get(path.suffix, start)


def test_curves_csv_holds_the_best_steps_runs(tmp_path: Path) -> None:
    best = [record(lr=0.1, seed=seed, rate=0.8) for seed in (0, 1)]
    figures.write([*best, record(lr=1.0, rate=0.9)], {}, tmp_path)
    table = rows(tmp_path / "mnist-nll.csv")
    assert {(row["lr"], row["seed"]) for row in table} == {("0.1", "0"), ("0.1", "1")}
    last = [float(row["train_nll"]) for row in table if row["epoch"] == "10"]
    assert last == pytest.approx([best[0].final()] * 2, rel=1e-5)


def test_steps_csv_names_the_best_and_the_diverged(tmp_path: Path) -> None:
    figures.write(grid({1e-3: 0.4, 1e-2: 0.2, 1e-1: None}), {}, tmp_path)
    table = rows(tmp_path / "mnist-steps.csv")
    assert [row["status"] for row in table] == ["finished", "finished", "diverged"]
    assert [row["best"] for row in table] == ["False", "True", "False"]


def test_inversion_draws_two_steps_of_the_pixels_as_given(tmp_path: Path) -> None:
    runs = grid({1e-3: 0.1, 1e-2: 0.2, 1e-1: 0.3}, experiment="inversion", variant="original")
    runs += grid({1e-3: 0.3, 1e-2: 0.2, 1e-1: 0.1}, experiment="inversion", variant="inverted")
    figures.write(runs, {}, tmp_path)
    table = rows(tmp_path / "inversion-nll.csv")
    assert {(row["variant"], row["lr"]) for row in table} == {
        (variant, lr) for variant in ("original", "inverted") for lr in ("0.001", "0.01")
    }


def test_picture_errors(tmp_path: Path) -> None:
    run = record("faces", output="gaussian", pictures=pictures(51))
    figures.write([run], {}, tmp_path)
    table = rows(tmp_path / "faces-pictures.csv")
    assert [float(row["mse"]) for row in table] == pytest.approx([0.2**2] * 4)


def test_only_diverged_runs_leave_no_curve(tmp_path: Path) -> None:
    figures.write(grid({1e-2: None, 1e-1: None}), {}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mnist-steps.csv",
        "mnist-steps.pdf",
        "mnist-steps.png",
    ]


def test_same_runs_same_bytes(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        figures.write(grid({1e-2: 0.2}), {}, tmp_path / folder)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_the_legend_fits_and_is_in_the_papers_order() -> None:
    # On the first variant the last algorithm alone, so that it is met first.
    runs = [record(variant="sigmoid", algorithm=ALGORITHMS[-1])]
    runs += [record(variant="tanh", algorithm=name) for name in ALGORITHMS]
    for shown in (runs, runs[1:]):
        figure = figures.curves(lines(shown), NLL)
        assert figure is not None
        figure.draw_without_rendering()
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == list(ALGORITHMS)
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width
