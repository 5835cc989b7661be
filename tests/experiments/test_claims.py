"""Verdicts: a set of runs in which every claim holds, and for each claim one change that undoes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from synthetic import grid, record, timing

from quasidiag.experiments.algorithms import ALGORITHMS
from quasidiag.experiments.claims import (
    CLAIMS,
    FAILS,
    HOLDS,
    OPEN,
    TASKS,
    apart,
    judge,
    over_seeds,
)
from quasidiag.experiments.report_runs import DIAGONAL, Line, Record, Task, lines

RATES = {"SGD": 0.97, "AdaGrad": 0.95} | dict.fromkeys(DIAGONAL, 0.9)
STUCK = ("SGD", "AdaGrad", "DMCNat")


def world() -> list[Record]:
    """Thirty epochs of everything, on two seeds."""
    found = []
    for task in TASKS:
        for algorithm in ALGORITHMS:
            rate = RATES.get(algorithm, 0.7)
            if task.experiment == "faces" and algorithm in STUCK:
                rate = 0.995
            output = "gaussian" if task.experiment in ("faces", "eeg") else "categorical"
            lr = 1e-6 if task == ("svhn", "relu") and algorithm in DIAGONAL else 1e-2
            for seed in (0, 1):
                one = record(
                    *task,
                    algorithm,
                    lr,
                    seed,
                    rate=rate,
                    start=2.3 + 0.01 * seed,
                    epochs=30,
                    output=output,
                    valid_error=0.009,
                )
                found.append(one)
    found += [record("svhn", "relu", name, 1e-4, diverged=True, epochs=30) for name in DIAGONAL]
    for algorithm in ALGORITHMS:
        for variant in ("original", "inverted"):
            given = variant == "original" or algorithm not in STUCK
            rate = RATES.get(algorithm, 0.7) if given else 0.9
            found += [
                record("inversion", variant, algorithm, lr, rate=rate, epochs=30)
                for lr in (1e-3, 1e-2)
            ]
    return found


def verdicts(records: list[Record], ratio: float | None = 1.9) -> dict[str, str]:
    table = {} if ratio is None else timing(ratio)
    return {f.claim.key: f.verdict for f in judge(lines(records), table)}


def changed(records: list[Record], where: Callable[[Record], bool], rate: float) -> list[Record]:
    """The same runs, those picked out with another training curve."""
    found = []
    for run in records:
        if where(run):
            curve = {**run.curve, "train_nll": [2.3 * rate**k for k in run.curve["epoch"]]}
            curve["train_error"] = curve["train_nll"]
            run = replace(run, curve=curve)
        found.append(run)
    return found


def test_every_claim_holds_where_it_should() -> None:
    assert verdicts(world()) == {claim.key: HOLDS for claim in CLAIMS}


def test_nothing_is_claimed_without_runs() -> None:
    assert verdicts([], ratio=None) == {claim.key: OPEN for claim in CLAIMS}


def test_short_runs_are_not_judged() -> None:
    short = [replace(run, config={**run.config, "epochs": 4}) for run in world()]
    assert set(verdicts(short, ratio=None).values()) == {OPEN}


@pytest.mark.parametrize(
    ("key", "where", "rate"),
    [
        ("beats-sgd", lambda r: r.task == ("eeg", "sigmoid") and r.algorithm == "SGD", 0.6),
        ("beats-adagrad", lambda r: r.task == ("mnist", "relu") and r.algorithm == "AdaGrad", 0.6),
        ("sigmoid-tanh", lambda r: r.task == ("mnist", "tanh") and r.algorithm == "QDOP", 0.65),
        ("inversion", lambda r: r.task == ("inversion", "inverted") and "QD" in r.algorithm, 0.65),
        ("inversion", lambda r: r.task[0] == "inversion" and r.algorithm == "SGD", 0.97),
        ("one-sample", lambda r: r.task[0] == "sparse" and r.algorithm == "QDMCNat", 0.8),
        ("sparse", lambda r: r.task[0] == "sparse" and r.algorithm == "QDNat", 0.8),
        ("faces", lambda r: r.task[0] == "faces" and r.algorithm == "AdaGrad", 0.9),
        ("faces", lambda r: r.task[0] == "faces" and r.algorithm == "QDOP", 0.99),
    ],
)
def test_one_change_undoes_a_claim(key: str, where: Callable[[Record], bool], rate: float) -> None:
    assert verdicts(changed(world(), where, rate))[key] == FAILS


def test_two_that_diverged_are_not_as_good_as_each_other() -> None:
    pair = [
        record("mnist", "sigmoid", name, diverged=True, epochs=30) for name in ("QDMCNat", "QDNat")
    ]
    assert verdicts(pair)["one-sample"] == OPEN
    assert verdicts([pair[0], record("mnist", "sigmoid", "QDNat")])["one-sample"] == FAILS
    assert verdicts([record("mnist", "sigmoid", "QDMCNat"), pair[1]])["one-sample"] == HOLDS


def test_slow_optimizer_undoes_the_overhead() -> None:
    assert verdicts(world(), ratio=2.6)["overhead"] == FAILS


def test_a_smoke_timing_is_not_judged() -> None:
    table = timing()
    table["cpu"]["scale"] = "smoke"
    found = {f.claim.key: f.verdict for f in judge(lines(world()), table)}
    assert found["overhead"] == OPEN


def test_dropout_above_one_percent() -> None:
    high = [
        replace(run, curve={**run.curve, "valid_error": [0.011] * len(run.curve["epoch"])})
        for run in world()
    ]
    assert verdicts(high)["dropout"] == FAILS


def test_what_a_smaller_scale_does_not_reach_is_not_refuted() -> None:
    slow = changed(world(), lambda r: r.task[0] == "sparse", 0.9)
    small = [replace(run, config={**run.config, "scale": "small"}) for run in slow]
    assert verdicts(slow)["sparse"] == FAILS
    assert verdicts(small)["sparse"] == OPEN


def test_a_diagonal_run_that_trains_undoes_its_divergence() -> None:
    stable = record("svhn", "relu", "DOP", 1e-3, epochs=30)
    assert verdicts([*world(), stable])["svhn-diagonal"] == FAILS
    without = [run for run in world() if not run.diverged]
    assert verdicts(without)["svhn-diagonal"] == OPEN


def test_one_worse_seed_is_enough_to_lose() -> None:
    worse = changed(
        world(),
        lambda r: r.task == ("svhn", "sigmoid") and r.algorithm == "QDOP" and r.seed == 1,
        0.99,
    )
    assert verdicts(worse)["beats-sgd"] == FAILS


def test_a_missing_task_leaves_a_claim_open() -> None:
    partial = [run for run in world() if run.task.experiment != "eeg"]
    finding = judge(lines(partial), timing())[0]
    assert finding.verdict == OPEN
    assert finding.tally == f"{len(finding.checks) - 1} of {len(finding.checks)}, 1 without data"


def test_a_line_that_diverged_everywhere_loses() -> None:
    lost = [
        replace(run, diverged=True) if run.task[0] == "eeg" and run.algorithm == "QDOP" else run
        for run in world()
    ]
    assert verdicts(lost)["beats-sgd"] == FAILS


def test_best_step_is_chosen_on_the_grids_seed() -> None:
    runs = [*grid({1e-3: 0.5, 1e-2: 0.2, 1e-1: 0.3, 1.0: None})]
    lucky = record(lr=1e-1, seed=1, start=0.01, rate=1.0)
    line = lines([*runs, lucky])[0]
    assert line.best == 1e-2
    assert line.edge == ""
    assert line.ranking == [1e-2, 1e-1, 1e-3]


def test_dropout_chooses_its_step_by_the_validation_loss() -> None:
    runs = grid({1e-2: 0.2, 1e-1: 0.1}, experiment="dropout")
    overfitted = replace(runs[1], curve={**runs[1].curve, "valid_nll": [0.9] * 11})
    assert lines([runs[0], overfitted])[0].best == 1e-2


@pytest.mark.parametrize(
    ("finals", "edge"),
    [
        ({1e-3: 0.1, 1e-2: 0.2}, "low"),
        ({1e-3: 0.2, 1e-2: 0.1}, "high"),
        ({1e-3: 0.2, 1e-2: 0.1, 1e-1: None}, ""),
        ({1e-2: 0.1}, ""),
    ],
)
def test_best_step_on_the_edge_of_the_grid(finals: dict[float, float | None], edge: str) -> None:
    assert lines(grid(finals))[0].edge == edge


def test_all_diverged_has_no_best_step() -> None:
    line = Line(Task("mnist", "sigmoid"), "SGD", tuple(grid({1e-1: None, 1.0: None})))
    assert line.best is None
    assert line.edge == ""
    assert line.chosen == []


def test_distance_of_two_curves_is_their_median_factor() -> None:
    one, twice = record(start=1.0), record(start=2.0)
    assert apart([one], [twice]) == pytest.approx(2)
    assert apart([twice], [one]) == pytest.approx(2)
    assert apart([one], [replace(twice, diverged=True)]) == float("inf")


def test_figures_over_seeds_in_words() -> None:
    assert over_seeds([0.5]) == "0.5 (1 seed)"
    assert over_seeds([0.009, 0.011], 100, " %") == "1 ± 0.14 % (2 seeds)"
    assert over_seeds([0.5, float("inf")]) == "0.5 (2 seeds, 1 diverged)"
    assert over_seeds([]) == "diverged at every step size tried"
