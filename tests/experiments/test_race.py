"""The race: who runs what, that a killed race goes on, and what the tables say of known curves."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quasidiag as qd
from quasidiag.experiments import pool
from quasidiag.experiments.runs import RunDir, write_json
from quasidiag.race import contenders, networks, pictures, summary, tables, tasks, timing, train
from quasidiag.race.contenders import CONTENDERS, OURS, Contender
from quasidiag.race.plan import Plan, ordered
from quasidiag.race.tasks import RaceConfig
from quasidiag.race.train import RaceTrainer, split, work

TINY = ("layers=56,6,56", "epochs=2")


def plan(root: Path, data_dir: str, names: tuple[str, ...] = (OURS, "AdamW"), **values) -> Plan:
    return Plan(
        tasks.find("eeg"),
        "smoke",
        str(root),
        "eeg",
        "cpu",
        TINY,
        names,
        data_dir=data_dir,
        **values,
    )


def test_ours_has_one_trial_and_peers_have_a_grid_and_two_schedules(tmp_path, data_dir):
    configs = ordered([plan(tmp_path, data_dir)])
    own = [c for c in configs if c.algorithm == OURS]
    peers = [c for c in configs if c.algorithm == "AdamW"]
    assert [(c.variant, c.lr) for c in own] == [("constant", 1.0)]
    assert {(c.variant, c.lr) for c in peers} == {
        (schedule, lr) for schedule in ("constant", "cosine") for lr in (1e-4, 1e-3)
    }
    assert configs[:1] == own
    robust = [c for c in ordered([plan(tmp_path, data_dir, robustness=True)]) if c not in configs]
    assert {c.lr for c in robust if c.variant == "factor"} == set(tasks.FACTORS)
    assert {c.batch_size for c in robust} == {50, *tasks.BATCHES}
    assert {c.algorithm for c in robust} == {OURS}


def test_what_ours_is_made_with(data_dir):
    config = tasks.find("eeg").config("constant", OURS, 1.0, scale="smoke")
    share = tasks.find("eeg").config("share-0.1", OURS, 1.0, scale="smoke")
    assert RaceTrainer(share, data_dir).optimizer.metric_fraction == 0.1
    optimizer = RaceTrainer(config, data_dir).optimizer
    assert optimizer.metric_fraction is None
    assert isinstance(optimizer, qd.Riemannian)
    assert optimizer.auto is not None
    assert [group["lr"] for group in optimizer.param_groups] == [1.0]


@pytest.mark.parametrize("task", [task.name for task in tasks.TASKS])
def test_every_task_trains_with_ours(task, data_dir):
    config = tasks.find(task).config("constant", OURS, 1.0, scale="smoke")
    trainer = RaceTrainer(replace(config, train_size=100, valid_size=20), data_dir)
    before = trainer.evaluate()["train_nll"]
    for _ in range(5):  # a step that did harm is taken back, and an epoch has only two
        trainer.train_epoch()
    assert trainer.evaluate()["train_nll"] < before


@pytest.mark.parametrize("name", [n for n in contenders.installed() if n != OURS])
@pytest.mark.parametrize("task", ["learned", "gpt", "convolutional"])
def test_every_contender_takes_its_steps(task, name, data_dir):
    config = tasks.find(task).config("cosine", name, 1e-3, scale="smoke")
    trainer = RaceTrainer(replace(config, train_size=100, valid_size=20), data_dir)
    before = [p.clone() for p in [*trainer.model.parameters(), *trainer.criterion.parameters()]]
    trainer.train_epoch()
    after = [*trainer.model.parameters(), *trainer.criterion.parameters()]
    assert all(p.isfinite().all() for p in after)
    assert all(not p.equal(q) for p, q in zip(before, after))


def test_muon_in_float32_is_torchs():
    torch.manual_seed(0)
    for shape in ((6, 4), (4, 6)):
        ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
        mine = contenders.Muon32([ours], lr=0.1, weight_decay=0.0)
        known = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0)
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            mine.step()
            known.step()
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)  # bfloat16 has 8 bits


def test_the_cosine_goes_from_one_towards_zero_and_a_constant_stays():
    config = tasks.find("ae").config("cosine", "AdamW", 1e-3, scale="full")
    factors = [config.factor(epoch) for epoch in range(config.epochs)]
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)
    assert 0 < factors[-1] < 0.01
    assert replace(config, schedule="constant").factor(20) == 1


def test_minibatches_are_shuffled_anew_in_every_epoch_and_the_same_when_resumed(data_dir):
    config = tasks.find("eeg").config("constant", "SGD", 1e-3, scale="smoke")

    def first(epoch: int, seed: int = 0) -> torch.Tensor:
        trainer = RaceTrainer(replace(config, seed=seed), data_dir)
        trainer.epoch = epoch
        return torch.cat([x for x, _ in trainer._minibatches()])

    assert first(0).equal(first(0))
    assert not first(0).equal(first(1))
    assert not first(0).equal(first(0, seed=1))
    whole = split(config, data_dir).train[0]
    assert first(0).sort(0).values.equal(whole.sort(0).values)


def test_a_run_that_a_deadline_stopped_ends_as_if_it_had_not(tmp_path, data_dir):
    config = plan(tmp_path, data_dir).config("cosine", OURS, 1.0)
    whole = work(config.to_dict(), pool.Settings(str(tmp_path / "whole"), data_dir))
    assert whole.error is None
    assert whole.result is not None
    trainer = RaceTrainer(config, data_dir)
    store = RunDir(tmp_path / "parts", config)
    with store.locked():
        store.begin({})
        store.append(trainer.evaluate())
        trainer.train_epoch()
        store.append(trainer.evaluate())
        store.save(trainer)
    rest = work(config.to_dict(), pool.Settings(str(tmp_path / "parts"), data_dir))
    assert rest.error is None
    assert rest.result is not None
    assert rest.result["final"]["train_nll"] == whole.result["final"]["train_nll"]


def test_a_config_survives_json():
    config = tasks.find("gpt").config("cosine", OURS, 1.0, scale="smoke")
    again = RaceConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.id == config.id


def test_no_position_of_the_gpt_sees_what_comes_after_it():
    torch.manual_seed(0)
    model, x = networks.GPT(), torch.randint(100, (1, networks.CONTEXT))
    y = model(x)
    x[0, 40:] = torch.randint(100, (24,))
    torch.testing.assert_close(model(x)[0, :40], y[0, :40])


def curve(*losses: float) -> dict[str, list[float]]:
    epochs = [float(k) for k in range(len(losses))]
    return {"epoch": epochs, "loss": list(losses), "seconds": epochs}


def test_when_a_curve_reaches_a_level():
    assert summary.reached(curve(10, 4, 2), 3) == 1.5
    assert summary.reached(curve(10, 4, 5, 2), 4) == 1
    assert summary.reached(curve(10, 4), 3) is None
    assert summary.reached(curve(10, 4), 10) == 0
    assert summary.at(curve(10, 4, 2), 0.5) == 7


def test_the_comparison_of_known_curves():
    rows = {
        name: {"contender": name, "curve": curve(*losses)}
        for name, losses in {OURS: (10, 2, 1), "AdamW": (10, 6, 4), "SGD": (10, 9, 8)}.items()
    }
    paces = {
        OURS: {"first": [0.1, 0.2, 0.22], "then": 0.02},
        "AdamW": {"first": [0.01], "then": 0.01},
    }
    summary._compare(rows, steps=100, timing=paces)
    ours, adamw = rows[OURS], rows["AdamW"]
    assert ours["seconds_per_step"] == 0.02
    assert ours["to_reference"] == 75
    assert ours["ratio"] == pytest.approx(0.375)
    assert adamw["ratio"] == 1
    assert rows["SGD"]["ratio"] is None
    level = ours["levels"]["1.0"]  # SGD ends at 8
    assert level["loss"] == 8
    assert level["steps"] == 25
    assert level["seconds"] == pytest.approx(0.22 + 22 * 0.02)
    assert adamw["levels"]["1.0"]["steps"] == 50
    assert adamw["levels"]["1.0"]["seconds"] == pytest.approx(0.5)
    assert rows["SGD"]["levels"]["1.0"] == {"loss": 8, "steps": 200, "seconds": None}
    assert rows["SGD"]["seconds_per_step"] is None


def test_a_level_of_the_first_steps_takes_the_time_of_these():
    rows = {
        name: {"contender": name, "curve": curve(*losses)}
        for name, losses in {OURS: (10, 2, 1), "SGD": (10, 9, 8)}.items()
    }
    pace = {"first": [0.1 * (k + 1) for k in range(20)], "then": 0.01}
    summary._compare(rows, steps=10, timing={OURS: pace, "SGD": pace})
    level = rows[OURS]["levels"]["1.0"]  # the loss falls by .8 a step, from 10 to 8
    assert level["steps"] == 2
    assert level["seconds"] == pytest.approx(0.25)


def test_what_runs_do_to_data_that_nobody_trained_on():
    runs = [
        [{"valid_nll": loss, "valid_error": loss / 10} for loss in losses]
        for losses in ((3.0, 1.0, 2.0), (5.0, 4.0, 4.5), (3.0, math.nan, 7.0))
    ]
    spoilt = [*runs, [{"valid_nll": None, "valid_error": 0.1}]]
    assert summary.unseen(spoilt, "valid_nll")["final"] is None
    assert summary.unseen(runs, "valid_nll") == {
        "lowest": pytest.approx(8 / 3),
        "final": pytest.approx(4.5),
        "errors": pytest.approx(0.45),
    }


def test_the_clock_of_a_run():
    pace: timing.Pace = {"first": [0.4, 0.6], "then": 0.1}
    assert timing.elapsed(pace, 0) == 0
    assert timing.elapsed(pace, 0.5) == pytest.approx(0.2)
    assert timing.elapsed(pace, 1) == 0.4
    assert timing.elapsed(pace, 1.25) == pytest.approx(0.45)
    assert timing.elapsed(pace, 2) == 0.6
    assert timing.elapsed(pace, 4.5) == pytest.approx(0.85)


def test_curves_by_time_go_by_the_clock_of_a_run():
    row = {
        "contender": "SGD",
        "lr": 0.1,
        "schedule": "constant",
        "seeds": 1,
        "curve": curve(8, 4, 2, 1),
    }
    timed = {
        "device": "cpu",
        "threads": 2,
        "SGD": {"first": [0.4, 0.6], "then": 0.1},
    }
    known = {"title": "", "loss": "train_nll", "batch_size": 50, "steps_per_epoch": 1}
    by_step, by_time = pictures.draw({**known, "timing": timed, "contenders": [row]}).axes
    assert list(by_step.lines[0].get_xdata()) == [1, 2, 3]
    assert list(by_time.lines[0].get_xdata()) == pytest.approx([0.4, 0.6, 0.7])


def test_tables_of_later_steps_and_of_the_first_four():
    pace = {"first": [0.1, 0.2, 0.3, 0.36, 0.37], "then": 0.01}
    row = {"contender": "SGD"}
    known = {"title": "EEG", "timing": {"device": "cpu", "SGD": pace}, "contenders": [row]}
    assert tables.paces([known]).endswith("| EEG | 10 |")
    assert tables.starts([known]).endswith("| EEG | 90 |")
    assert tables.paces([{**known, "timing": None}]) == ""


class Clock:
    """Goes on by a millisecond whenever it is read, and while somebody sleeps: no other load makes it run faster."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The one that the race is timed by."""
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


class Sleepy(torch.optim.SGD):
    """SGD that sleeps in its steps, so many seconds by their number."""

    clock: Clock
    sleeps: Callable[[int], float]
    number = 0

    def step(self, closure=None):
        self.number += 1
        self.clock.now += self.sleeps(self.number)
        super().step()


def asleep(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, name: str, sleeps: Callable[[int], float]
) -> list[Sleepy]:
    """Let a sleepy one race by that name; each that is made is in the list."""
    made: list[Sleepy] = []

    def make(model, criterion, lr, device) -> Sleepy:
        made.append(Sleepy(model.parameters(), lr=lr))
        made[-1].clock, made[-1].sleeps = clock, sleeps
        return made[-1]

    monkeypatch.setitem(CONTENDERS, name, Contender(make, (-3,)))
    return made


def test_the_pace_is_that_of_fresh_runs(tmp_path, data_dir, monkeypatch, clock):
    made = asleep(monkeypatch, clock, "SGD", lambda number: 0.05 if number <= 2 else 0.0)
    found = timing.measure(plan(tmp_path, data_dir, (OURS, "SGD")), rounds=3)
    assert list(found) == ["device", OURS, "SGD"]
    for pace in (found[OURS], found["SGD"]):
        assert len(pace["first"]) == timing.FIRST
        assert pace["first"] == sorted(pace["first"])
        assert pace["first"][0] > 0
        assert pace["then"] > 0
    assert [one.number for one in made] == [timing.WARM_UP, *[timing.FIRST + timing.PEERS] * 3]
    first = found["SGD"]["first"]
    assert first[0] > 0.05 and first[1] > 0.1
    assert found["SGD"]["then"] < 0.05


def test_what_a_process_does_once_is_not_counted(tmp_path, data_dir, monkeypatch, clock):
    once = iter([0.5])
    asleep(monkeypatch, clock, "SGD", lambda number: next(once, 0.0))
    found = timing.measure(plan(tmp_path, data_dir, ("SGD",)), rounds=1)
    assert found["SGD"]["first"][-1] < 0.5


@pytest.mark.parametrize("name", [OURS, "AdamW"])
def test_what_is_timed_is_the_run_itself(name, tmp_path, data_dir):
    """Epochs of four minibatches follow each other as in the race."""
    timed, twin = (timing._trainer(plan(tmp_path, data_dir), name) for _ in range(2))
    timing._pace(timed, 20)
    for _ in range((timing.FIRST + 20) // 4):
        twin.train_epoch()
    assert all(p.equal(q) for p, q in zip(timed.model.parameters(), twin.model.parameters()))


def test_a_slow_contender_does_not_take_the_time_of_others(tmp_path, data_dir, monkeypatch, clock):
    slow = asleep(monkeypatch, clock, "AdamW", lambda number: 0.03)
    quick = asleep(monkeypatch, clock, "SGD", lambda number: 0.0)
    race = plan(tmp_path, data_dir, ("AdamW", "SGD"))
    found = timing.measure(race, rounds=3, seconds=2.0)
    assert len(slow) == 1 + 1  # a round of 1.2 seconds is more than its half
    assert len(quick) == 1 + 3
    assert found["AdamW"]["then"] > 0.03


def test_without_any_time_there_is_one_round(tmp_path, data_dir, monkeypatch, clock):
    made = asleep(monkeypatch, clock, "SGD", lambda number: 0.0)
    found = timing.measure(plan(tmp_path, data_dir, (OURS, "SGD")), seconds=-1.0)
    assert len(made) == 1 + 1
    assert found[OURS]["then"] > 0


def test_the_loss_is_looked_at_on_the_way(data_dir):
    """At the same steps whatever the epoch, and without a trace in the training."""
    config = tasks.find("eeg").config("constant", OURS, 1.0, scale="smoke")
    config = replace(config, batch_size=16)
    trainer, twin = (RaceTrainer(config, data_dir) for _ in range(2))
    lines = [trainer.evaluate()]
    for _ in range(3):
        trainer.train_epoch()
        lines.append(trainer.evaluate())
    assert [len(line["within"]) for line in lines] == [0, 12, 9, 5]
    twin._look = lambda epoch: None
    for _ in range(3):
        twin.train_epoch()
    assert twin.evaluate()["train_error"] == lines[-1]["train_error"]
    curve = summary.mean_curve([lines, lines], "train_error")
    assert curve["epoch"][:3] == [
        0.0,
        pytest.approx(1 / 12, abs=1e-6),
        pytest.approx(2 / 12, abs=1e-6),
    ]
    assert curve["epoch"][-1] == 3.0 and curve["loss"][-1] == lines[-1]["train_error"]
    assert curve["loss"] == curve["low"] == curve["high"]
    assert summary.at(curve, 1.0) == pytest.approx(lines[1]["train_error"], rel=1e-5)


def test_how_many_steps_an_epoch_has_is_read_from_the_runs():
    looks = [[round(n / 1234, 6), 1.0] for n in range(1, 30)]
    whole = [{"within": []}, {"within": looks}, {"within": None}]
    without = [{"within": []}, {"within": looks[1:]}]  # the first loss was not finite
    assert summary._steps_per_epoch([without, whole]) == 1234
    assert summary._steps_per_epoch([]) == 0


def test_when_the_loss_is_looked_at():
    steps = [n for n in range(1, 2000) if train.looked_at(n)]
    assert steps[:20] == list(range(1, 21))
    assert all(1.0 < b / a < 1.25 for a, b in itertools.pairwise(steps[19:]))


def test_more_seeds_for_what_stands_for_a_contender_only(tmp_path, data_dir):
    race = Plan(
        tasks.find("eeg"),
        "medium",
        str(tmp_path),
        "eeg",
        overrides=TINY,
        algorithms=(OURS, "AdamW"),
    )
    while pending := race.pending():
        for config in pending:
            final = {"train_error": abs(config.lr - 1e-3) + (config.variant == "cosine")}
            RunDir(tmp_path, config).path.mkdir(parents=True)
            write_json(
                RunDir(tmp_path, config).path / "result.json",
                {"status": "finished", "final": final},
            )
    seeds = {
        (a, s): [
            k for k in range(3) if race.result(race.config(s, a, 1.0 if a == OURS else 1e-3, k))
        ]
        for a in (OURS, "AdamW")
        for s in ("constant", "cosine")
    }
    assert seeds == {
        (OURS, "constant"): [0, 1, 2],
        (OURS, "cosine"): [],
        ("AdamW", "constant"): [0, 1, 2],
        ("AdamW", "cosine"): [0],
    }


def test_no_two_curves_look_alike():
    from matplotlib.colors import rgb_to_hsv, to_rgb

    assert list(pictures.STYLES) == list(CONTENDERS)
    for (one, line), (other, dash) in itertools.combinations(pictures.STYLES.values(), 2):
        apart = abs(rgb_to_hsv(to_rgb(one))[0] - rgb_to_hsv(to_rgb(other))[0])
        assert line != dash or 30 / 360 < apart < 330 / 360, (one, other)
