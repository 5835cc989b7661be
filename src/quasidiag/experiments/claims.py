"""The paper's claims as data, and the rules that judge them from runs.

Each claim has a list of checks, computed from the lines (an algorithm on a task, with all its runs)
and from the timing. The claim holds if all its checks do, does not hold if one fails, and is open
while one has no data. The thresholds that turn words such as "near" into numbers were fixed here
before any run was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .report_runs import (
    DIAGONAL,
    QUASI_DIAGONAL,
    Line,
    Record,
    Task,
    mean_curve,
)
from .tasks import EXPERIMENTS

HOLDS, FAILS, OPEN = "holds", "does not hold", "not enough data"

MIN_EPOCHS = 5  # a shorter run says nothing about where training leads
SAME = 1.25  # two curves agree if their ratio is typically below this
STUCK = 0.8  # an error stayed near its first epoch's if it ends above this fraction of it
WELL_BELOW = 2 / 3
ABOUT_TWO = 2.5

TASKS = tuple(
    Task(experiment.name, variant)
    for experiment in EXPERIMENTS
    if experiment.name != "inversion"
    for variant in experiment.variants
)


@dataclass(frozen=True)
class Check:
    """One comparison; `holds` is None where runs for it are missing or too short."""

    subject: str
    measured: str
    holds: bool | None


@dataclass(frozen=True)
class Evidence:
    """The data that claims are judged from: the lines, and the timing by device."""

    lines: Sequence[Line]
    timing: dict[str, Any]

    def find(self, task: Task, algorithm: str) -> Line | None:
        """The line of ``algorithm`` on ``task``; None if there is none or it is shorter than ``MIN_EPOCHS``."""
        for line in self.lines:
            if (line.task, line.algorithm) == (task, algorithm):
                return line if line.records[0].config["epochs"] >= MIN_EPOCHS else None
        return None


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and how it is judged."""

    key: str
    paper: str
    statement: str
    rule: str
    judge: Callable[[Evidence], Iterator[Check]]


@dataclass(frozen=True)
class Finding:
    """A claim with its checks and the verdict that follows from them."""

    claim: Claim
    checks: list[Check]

    @property
    def verdict(self) -> str:
        outcomes = [check.holds for check in self.checks]
        if False in outcomes:
            return FAILS
        return OPEN if None in outcomes or not outcomes else HOLDS

    @property
    def tally(self) -> str:
        """How many of the checks hold, in words."""
        held = sum(check.holds is True for check in self.checks)
        missing = sum(check.holds is None for check in self.checks)
        return f"{held} of {len(self.checks)}" + (f", {missing} without data" if missing else "")


def over_seeds(values: Sequence[float], scale: float = 1.0, unit: str = "") -> str:
    """Mean ± standard deviation of the finite values (one per seed), and how many seeds there are and diverged."""
    if not values:
        return "diverged at every step size tried"
    finite = [value * scale for value in values if math.isfinite(value)]
    if not finite:
        return "diverged"
    spread = f" ± {np.std(finite, ddof=1):.2g}" if len(finite) > 1 else ""
    lost = f", {len(values) - len(finite)} diverged" if len(finite) < len(values) else ""
    seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}{lost}"
    return f"{np.mean(finite):.4g}{spread}{unit} ({seeds})"


def apart(first: Sequence[Record], second: Sequence[Record], name: str = "train_nll") -> float:
    """The typical factor between two mean curves, as a median over epochs of a ratio above 1; inf if a run diverged."""
    a, b = mean_curve(first, name)[0][1:], mean_curve(second, name)[0][1:]
    length = min(len(a), len(b))
    if not length or any(record.diverged for record in (*first, *second)):
        return math.inf
    return float(np.exp(np.median(np.abs(np.log(a[:length] / b[:length])))))


def distance(factor: float) -> str:
    """The factor between two curves in words."""
    return f"a factor {factor:.3g} apart" if math.isfinite(factor) else "one of the runs diverged"


def beats(rival: str) -> Callable[[Evidence], Iterator[Check]]:
    """A judge: on each task, does every seed of each quasi-diagonal algorithm end below every seed of ``rival``?"""

    def judge(evidence: Evidence) -> Iterator[Check]:
        for task in TASKS:
            other = evidence.find(task, rival)
            found = [(name, evidence.find(task, name)) for name in QUASI_DIAGONAL]
            present = [(name, line) for name, line in found if line is not None]
            if other is None or not present:
                yield Check(str(task), "no runs", None)
                continue
            theirs = other.finals(other.select)
            for name, line in present:
                ours = line.finals(line.select)
                holds = max(ours, default=math.inf) < min(theirs, default=math.inf)
                measured = f"{over_seeds(ours)}; {rival} {over_seeds(theirs)}"
                yield Check(f"{task}, {name}", measured, holds)

    return judge


def sigmoid_is_tanh(evidence: Evidence) -> Iterator[Check]:
    def factor(algorithm: str) -> float | None:
        sigmoid = evidence.find(Task("mnist", "sigmoid"), algorithm)
        tanh = evidence.find(Task("mnist", "tanh"), algorithm)
        if sigmoid is None or tanh is None or sigmoid.best is None or not tanh.at(sigmoid.best):
            return None
        return apart(sigmoid.chosen, tanh.at(sigmoid.best))

    sgd = factor("SGD")
    beside = "" if sgd is None else f"; SGD: {distance(sgd)}"
    for name in QUASI_DIAGONAL:
        value = factor(name)
        if value is None:
            yield Check(name, "no runs", None)
        else:
            yield Check(name, f"{distance(value)}{beside}", value <= SAME)


def one_sample_is_enough(evidence: Evidence) -> Iterator[Check]:
    compared = False
    for task in TASKS:
        sampled, exact = evidence.find(task, "QDMCNat"), evidence.find(task, "QDNat")
        if sampled is None or exact is None:
            continue
        if not sampled.chosen and not exact.chosen:
            continue
        compared = True
        name = "train_error" if exact.records[0].column("train_mse") else "train_nll"
        ours, theirs = sampled.finals(name), exact.finals(name)
        better = max(ours, default=math.inf) <= min(theirs, default=math.inf)
        factor = apart(sampled.chosen, exact.chosen, name)
        measured = f"{distance(factor)}; ends at {over_seeds(ours)}, exact {over_seeds(theirs)}"
        yield Check(str(task), measured, bool(better or factor <= SAME))
    if not compared:
        yield Check("QDMCNat beside QDNat", "no runs", None)


def diagonal_diverges(evidence: Evidence) -> Iterator[Check]:
    task = Task("svhn", "relu")
    for name in DIAGONAL:
        line = evidence.find(task, name)
        above = [] if line is None else [lr for lr in line.steps if lr > 1.5e-5]
        if line is None or not above:
            yield Check(name, "no runs above 10⁻⁵", None)
            continue
        stable = [lr for lr in above if not all(run.diverged for run in line.at(lr))]
        measured = f"{len(above) - len(stable)} of {len(above)} step sizes diverged"
        if stable:
            measured += "; trained at " + ", ".join(f"{lr:g}" for lr in stable)
        yield Check(name, measured, not stable)


def _given_time(line: Line, holds: bool) -> bool | None:
    """``holds``, but None instead of False below the paper's scale, where there may have been too little data or time."""
    full = all(record.config.get("scale") == "paper" for record in line.chosen)
    return True if holds else False if full else None


def sparse_reaches(evidence: Evidence) -> Iterator[Check]:
    for name in QUASI_DIAGONAL:
        line = evidence.find(Task("sparse", "sigmoid"), name)
        if line is None:
            yield Check(name, "no runs", None)
            continue
        lowest = [record.lowest() for record in line.chosen]
        holds = max(lowest, default=math.inf) <= 1e-4
        yield Check(name, f"reaches {over_seeds(lowest)}", _given_time(line, holds))


def faces_stay(evidence: Evidence) -> Iterator[Check]:
    task, name = Task("faces", "sigmoid"), "train_error"
    ends: list[float] = []
    for rival in ("SGD", "AdaGrad", "DMCNat"):
        line = evidence.find(task, rival)
        if line is None or not line.chosen:
            lost = line is not None
            measured = "diverged at every step size tried" if lost else "no runs"
            yield Check(f"{rival} stays", measured, False if lost else None)
            continue
        parts = [run.final(name) / run.column(name)[1] for run in line.chosen]
        ends += line.finals(name)
        measured = f"ends at {over_seeds(parts)} of its first epoch's error"
        yield Check(f"{rival} stays", measured, min(parts, default=math.inf) >= STUCK)
    for algorithm in QUASI_DIAGONAL[:2]:
        line = evidence.find(task, algorithm)
        if line is None or not ends:
            yield Check(f"{algorithm} goes below", "no runs", None)
            continue
        finals = line.finals(name)
        measured = f"ends at {over_seeds(finals)}, the lowest of those at {min(ends):.3g}"
        holds = max(finals, default=math.inf) <= WELL_BELOW * min(ends)
        yield Check(f"{algorithm} goes below", measured, holds)


def overhead(evidence: Evidence) -> Iterator[Check]:
    timed = {k: v for k, v in evidence.timing.items() if v.get("scale") != "smoke"}
    device = "cpu" if "cpu" in timed else next(iter(timed), "")
    rows = {row["algorithm"]: row for row in timed.get(device, {}).get("rows", [])}
    for name in ("QDOP", "QDMCNat"):
        if name not in rows:
            yield Check(name, "not timed", None)
            continue
        row = rows[name]
        measured = f"{row['ratio']:.2f} times SGD on {device}; the paper {row['paper_ratio']:.2f}"
        yield Check(name, measured, row["ratio"] <= ABOUT_TWO)


def dropout_error(evidence: Evidence) -> Iterator[Check]:
    for variant in ("sigmoid", "relu"):
        found = [evidence.find(Task("dropout", variant), name) for name in QUASI_DIAGONAL]
        present = [line for line in found if line is not None and line.chosen]
        if not present:
            yield Check(variant, "no runs", None)
            continue
        best = min(present, key=lambda line: float(np.mean(line.finals("valid_error"))))
        errors = best.finals("valid_error")
        measured = f"{best.algorithm} ends at {over_seeds(errors, 100, ' %')}"
        yield Check(variant, measured, _given_time(best, bool(np.mean(errors) < 0.01)))


def inversion(evidence: Evidence) -> Iterator[Check]:
    for name in ("SGD", *QUASI_DIAGONAL):
        given = evidence.find(Task("inversion", "original"), name)
        inverted = evidence.find(Task("inversion", "inverted"), name)
        shared = [] if given is None or inverted is None else given.ranking[:2]
        label = f"{name} {'changes' if name == 'SGD' else 'does not change'}"
        if given is None or inverted is None or not shared:
            yield Check(label, "no runs", None)
            continue
        factors = {lr: apart(given.at(lr), inverted.at(lr)) for lr in shared if inverted.at(lr)}
        measured = ", ".join(f"{distance(factors[lr])} at {lr:g}" for lr in factors)
        same = [factor <= SAME for factor in factors.values()]
        if not same:
            yield Check(label, "no runs at the same step size", None)
        else:
            yield Check(label, measured, not any(same) if name == "SGD" else all(same))


CLAIMS = (
    Claim(
        "beats-sgd",
        "Figs. 2-8",
        "Quasi-diagonal algorithms beat SGD on every task.",
        "On each task, each of QDOP, QDMCNat and QDNat that was run ends with a lower training loss "
        "(with dropout: validation loss) than SGD, every seed below every seed, both at their best "
        "step size.",
        beats("SGD"),
    ),
    Claim(
        "beats-adagrad",
        "Figs. 2-8",
        "They beat AdaGrad too.",
        "The same comparison with AdaGrad in SGD's place.",
        beats("AdaGrad"),
    ),
    Claim(
        "sigmoid-tanh",
        "Fig. 2",
        "Quasi-diagonal training curves for sigmoid and tanh agree.",
        "At the step size that is best for sigmoid, the median over the epochs of the ratio of the "
        f"two training losses is at most {SAME}.",
        sigmoid_is_tanh,
    ),
    Claim(
        "inversion",
        "Fig. 1",
        "Inverting the pixels leaves quasi-diagonal training unchanged, but not SGD.",
        "At each of the two best step sizes on the pixels as given, the median ratio of the two "
        f"training losses is at most {SAME} for quasi-diagonal algorithms and above it for SGD.",
        inversion,
    ),
    Claim(
        "one-sample",
        "Figs. 2-5",
        "One Monte Carlo sample is as good as the exact metric.",
        "On each task with both, the training curve of QDMCNat is typically within a factor "
        f"{SAME} of QDNat's, or ends no higher.",
        one_sample_is_enough,
    ),
    Claim(
        "overhead",
        "Table 1",
        "A quasi-diagonal epoch costs about two SGD epochs.",
        f"Time of QDOP and of QDMCNat at most {ABOUT_TWO} times SGD's in the same rounds.",
        overhead,
    ),
    Claim(
        "dropout",
        "Fig. 3",
        "With dropout the validation error falls below 1 %.",
        "Validation error after the last epoch, mean over the seeds, of the best quasi-diagonal "
        "algorithm for each activation.",
        dropout_error,
    ),
    Claim(
        "svhn-diagonal",
        "Fig. 4",
        "On SVHN with ReLU the diagonal algorithms diverge at step sizes above 10⁻⁵.",
        "Every run of DOP, DMCNat and DNat at a larger step size ended non-finite or worse than it "
        "began.",
        diagonal_diverges,
    ),
    Claim(
        "sparse",
        "Fig. 5",
        "On the sparse net quasi-diagonal algorithms reach a training loss of 10⁻⁴ to 10⁻⁵.",
        "Lowest training loss of each, on its worst seed, at most 10⁻⁴.",
        sparse_reaches,
    ),
    Claim(
        "faces",
        "Fig. 6",
        "On faces SGD, AdaGrad and DMCNat stay near their first epoch's error; quasi-diagonal "
        "algorithms go well below.",
        f"The former end above {STUCK} of it; QDOP and QDMCNat end below two thirds of the best of "
        "them.",
        faces_stay,
    ),
)


def judge(lines: Sequence[Line], timing: dict[str, Any] | None = None) -> list[Finding]:
    """Every claim with its checks and verdict."""
    evidence = Evidence(lines, timing or {})
    return [Finding(claim, list(claim.judge(evidence))) for claim in CLAIMS]
