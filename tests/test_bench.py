"""The bench: what it measures, what it counts and what it prints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from quasidiag import cli
from quasidiag.bench import contenders, floor, losses, measure, peers, presets, show, timing
from quasidiag.bench.workloads import digits, gpt, mlp
from quasidiag.experiments.config import UsageError


def test_floor_is_the_papers_count_of_multiplications() -> None:
    workload = mlp((784, 800, 800, 10), 500)
    base = floor.of("SGD", workload, 10)
    assert base is not None
    want = {"DOP": 1.40, "QDOP": 1.80, "QDMCNat": 2.00, "QDNat": 3.62, "QDOP, metric on 1/10": 1.08}
    for name, ratio in want.items():
        counted = floor.of(name, workload, 10)
        assert counted is not None
        assert counted.multiplications / base.multiplications == pytest.approx(ratio, abs=0.005)
    size = sum(p.numel() for p in workload.model.parameters())
    assert base.bytes == 12 * size
    # A share of the samples is averaged in every step, all samples of every tenth step in a tenth of them.
    for name, each in {
        "QDOP": 24,
        "QDOP, metric on 1/10": 24,
        "QDOP, metric every 10": 9.6,
    }.items():
        counted = floor.of(name, workload, 10)
        assert counted is not None and counted.bytes == pytest.approx((12 + each) * size)
    assert floor.of("AdamW", workload, 10) is None


def test_floor_of_a_transformer_counts_the_tied_head() -> None:
    workload = gpt(2, length=8, width=16, depth=1, heads=2, vocabulary=32, device="cpu")
    samples, dense = 16, 16 * 48 + 16 * 16 + 2 * 16 * 64 + 16 * 32
    extra = floor.metric(workload, kept=2, vectors=0)
    assert extra.multiplications == 2 * samples * dense
    assert floor.step(workload).multiplications >= 3 * samples * dense


class Clock:
    """Hands out given times, and notes who was timed."""

    def __init__(self, times: list[float]) -> None:
        self.times, self.order = times, list[str]()

    def __call__(self, call: timing.Call, repeat: int) -> float:
        self.order += [str(call()) for _ in range(repeat)]
        return self.times.pop(0)


def raced(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, disturbed: Iterable[bool], rounds: int
) -> dict[str, timing.Timing]:
    answers = iter(disturbed)
    monkeypatch.setattr(timing, "_clock", lambda device, busy: clock)
    monkeypatch.setattr(timing.Others, "disturbed", lambda self: next(answers))
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    calls = {name: (lambda name=name: name) for name in ("a", "b")}
    return timing.interleaved(calls, "a", rounds, repeat=1, device=torch.device("cpu"))


def test_everybody_is_timed_between_two_turns_of_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    # One call each to see how long they take, then base, contender, base in every round.
    clock = Clock([*(1.0, 2.0), *(1.0, 4.0, 3.0), *(10.0, 40.0, 10.0)])
    found = raced(clock, monkeypatch, itertools.repeat(False), rounds=2)
    assert clock.order == ["a", "b"] + ["a", "b", "a"] * 2
    assert found["a"].ratio == 1.0 and found["a"].least_ms == 3.0
    slow = found["b"]
    assert slow.ratio == 3.0 and slow.rounds == 2  # of 4 / 2 and 40 / 10
    assert slow.median_ms == 22.0 and slow.ratio_of_least == 4 / 3


def test_a_disturbed_turn_is_taken_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock([*(1.0, 2.0), *(1.0, 90.0, 9.0), *(1.0, 2.0, 1.0)])
    found = raced(clock, monkeypatch, [True, False], rounds=1)
    assert found["b"].ratio == 2.0
    clock = Clock([1.0] * 100)
    raced(clock, monkeypatch, itertools.repeat(True), rounds=1)
    assert clock.order.count("b") == 1 + 1 + 2  # as often again as there are turns


def test_turns_of_slow_ones_are_short_unless_they_have_a_period() -> None:
    assert timing._repeat("SGD", 20.0, 10) == 10
    assert timing._repeat("QDNat", 100.0, 10) == 3
    assert timing._repeat("slow", 4000.0, 10) == 1
    assert timing._repeat("SOAP every 10", 100.0, 10) == 10


def test_others_are_noticed() -> None:
    others = timing.Others()
    others._busy -= 1e6
    assert not others.disturbed()  # too soon to tell
    others._start -= 1.0
    assert others.disturbed()
    others._busy += 2e6
    assert not others.disturbed()


def test_peak_memory_sees_what_a_call_holds() -> None:
    def call() -> None:
        x = torch.empty(1_000_000)
        del x
        torch.empty(10)

    assert timing.peak_bytes(call, torch.device("cpu")) >= 4_000_000


def test_smoke_writes_table_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "deep" / "smoke.json", tmp_path / "smoke.svg"
    assert cli.main(["bench", "smoke", "--json", str(out), "--plot", str(picture)]) == 0
    results = json.loads(out.read_text())
    (race,) = results["races"]
    assert not race["failed"]
    assert race["contenders"]["SGD"]["ratio"] == 1.0
    # Two numbers a weight (and one a bias, and the shift), never a per-sample gradient.
    assert 1.9 < race["contenders"]["QDOP"]["state_bytes_per_parameter"] / 4 < 2.1
    assert 0.9 < race["contenders"]["DOP"]["state_bytes_per_parameter"] / 4 < 1.1
    assert [p[0] for p in results["curves"][0]["points"]["QDOP"]] == [8, 16]
    assert picture.read_text().count("<svg") == 1
    printed = capsys.readouterr().out
    assert "| QDNat" in printed and "over SGD" in printed
    assert cli.main(["bench", "--from", str(out)]) == 0
    assert capsys.readouterr().out == printed
    assert cli.main(["bench", "--from", str(out), "--no-curves"]) == 0
    assert "against" in printed and "against" not in capsys.readouterr().out


def test_peers_can_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, later = tmp_path / "first.json", tmp_path / "later.json"
    assert cli.main(["bench", "smoke", "--rounds", "1", "--no-curves", "--json", str(first)]) == 0
    monkeypatch.setattr(peers, "installed", lambda: (dict(contenders.TORCH), {"Muon": "not here"}))
    for source in (first, later):  # again: they are renewed, not doubled
        given = ["--from", str(source), "--peers", "--rounds", "1", "--json", str(later)]
        assert cli.main(["bench", *given]) == 0
    own, beside = json.loads(later.read_text())["races"]
    assert own == json.loads(first.read_text())["races"][0]
    assert {"SGD", "QDNat", "RMSprop"} <= set(beside["contenders"])
    assert "- Muon: not here" in capsys.readouterr().out


def test_tables_go_into_a_page_between_marks(tmp_path: Path) -> None:
    out, page = tmp_path / "smoke.json", tmp_path / "page.md"
    assert cli.main(["bench", "smoke", "--no-curves", "--rounds", "1", "--json", str(out)]) == 0
    page.write_text("before\n<!-- bench smoke -->\nold\n<!-- end -->\nafter <!-- end -->\n")
    assert cli.main(["bench", "--from", str(out), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- bench smoke -->\n") and "old" not in text
    assert "| QDNat" in text and text.endswith("<!-- end -->\nafter <!-- end -->\n")
    with pytest.raises(UsageError, match="bench other"):
        show.insert({**json.loads(out.read_text()), "preset": "other"}, text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "x.foo"], "unknown kind of picture 'foo'"),
        (["--plot", "new/x.pgn"], "did you mean 'png'"),
        (["--json", "page.md/x.json"], "page.md/x.json: "),
        (["--json", "."], "not a file that can be written"),
        (["--from", "missing.json"], "there is no file missing.json"),
        (["--from", "page.md"], "page.md has no results"),
        (["--into", "missing.md"], "there is no file missing.md"),
        (["--into", "page.md"], "no <!-- bench smoke -->"),
    ],
)
def test_files_are_looked_at_before_anything_is_timed(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(measure, "run")
    Path("page.md").write_text("[]")
    assert cli.main(["bench", "smoke", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--rounds", "--losses"])
def test_no_rounds_and_no_epochs_are_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(measure, "run")
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "smoke", option, "0"])
    assert stop.value.code == 2 and "must be at least 1" in capsys.readouterr().err


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    assert "Time full training steps" in capsys.readouterr().out


def test_losses_of_a_full_and_an_amortised_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: losses.VARIANTS[name] for name in ("QDOP", "QDOP, metric every 5")}
    monkeypatch.setattr(losses, "VARIANTS", few)
    (found,) = losses.run("cpu", None, 1, lambda line: None, dataset="mnist-5k", rates=[1e-3])
    assert found["departure"]["QDOP"] == 0.0 < found["departure"]["QDOP, metric every 5"]
    assert all(0 < value < 2.4 for values in found["losses"].values() for value in values)
    assert "farthest from the full metric" in show._amortised(found)


def test_peers_that_fail_are_reported_not_fatal() -> None:
    race = presets.PRESETS["smoke"]().races[0]

    def broken(workload: object) -> None:
        raise RuntimeError("not today")

    found = measure.race(race, {"Broken": broken}, 2, lambda line: None)  # type: ignore[dict-item]
    assert found["failed"] == {"Broken": "RuntimeError: not today"}
    assert "- Broken: RuntimeError: not today" in show._race(found)


def test_a_peer_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LONGEST", -1.0)
    calls, _, failed = measure._prepare(mlp((20, 5), 4), {"SGD": contenders.PAPER["SGD"]})
    assert not calls and failed["SGD"].startswith("left out, its first step took")


def test_peers_run_in_a_race_of_their_own() -> None:
    preset = presets.PRESETS["smoke"]()
    preset.curves.clear()
    found = measure.run(preset, {"RMSprop": contenders.TORCH["RMSprop"]}, 2, lambda line: None)
    ours, others = found["races"]
    assert "RMSprop" not in ours["contenders"]
    assert set(others["contenders"]) == {"SGD", "QDOP", "QDMCNat", "QDNat", "RMSprop"}
    assert others["workload"] == ours["workload"] + ", beside other packages"


def test_peers_are_those_that_can_be_imported() -> None:
    found, missing = peers.installed()
    assert {"RMSprop", "AdamW", "AdamW fused"} <= set(found)
    assert not set(found) & set(missing)


def test_h200_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["bench", "h200"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_digits_come_in_minibatches_that_follow_each_other() -> None:
    workload = digits((784, 10), 500)
    step = contenders.PAPER["SGD"](workload)
    assert "mnist" in workload.name and 0 <= float(workload.x.min()) < float(workload.x.max()) == 1
    (x, t), (y, _), *_ = seen = [*itertools.islice(step.batches, len(workload.more) + 1)]  # type: ignore[attr-defined]
    assert torch.equal(x, workload.x) and torch.equal(t, workload.target) and not torch.equal(x, y)
    assert {len(a) for a, _ in seen} == {500}
    before = next(step.batches)[0]  # type: ignore[attr-defined]
    assert torch.equal(before, x)  # again and again


def test_without_digits_nothing_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(measure, "run")
    assert cli.main(["bench", "cpu", "--data-dir", str(tmp_path)]) == 2
    assert "mnist" in capsys.readouterr().err


def test_steps_before_the_first_turn_are_not_timed() -> None:
    steps: list[int] = []

    def make(workload: object) -> timing.Call:
        return lambda: steps.append(1)

    measure._prepare(mlp((20, 5), 4), {"SGD": make}, first=7)
    assert len(steps) == 7
