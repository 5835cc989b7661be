"""The page as text: everything is in it, nothing comes from elsewhere, and few runs are enough."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from synthetic import grid, pictures, record, timing

from quasidiag.experiments.claims import CLAIMS
from quasidiag.experiments.report import render
from quasidiag.experiments.report_page import facts, plotted, sections
from quasidiag.experiments.report_runs import Record, lines, records
from quasidiag.experiments.runs import Collection, Run
from quasidiag.experiments.tasks import EXPERIMENTS


class Outline(HTMLParser):
    """The attributes of every element, and the text of every cell."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def values(self, tag: str, name: str) -> list[str]:
        found = (attributes.get(name) for kind, attributes in self.elements if kind == tag)
        return [value for value in found if value is not None]


def charts(page: str) -> list[dict]:
    pattern = r'<script type="application/json">(.*?)</script>'
    return [json.loads(text) for text in re.findall(pattern, page, re.DOTALL)]


def test_a_page_without_runs_still_lists_everything() -> None:
    page = render([], {})
    outline = Outline(page)
    assert [e.name for e in EXPERIMENTS] == outline.values("section", "id")[1:-1]
    assert page.count("No finished runs") == len(EXPERIMENTS)
    assert "Not measured" in page
    assert page.count("verdict open") == len(CLAIMS)
    assert outline.values("tr", "data-claim") == [claim.key for claim in CLAIMS]


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = render([*grid({1e-2: 0.2}), record("faces", pictures=pictures())], timing())
    outline = Outline(page)
    links = outline.values("a", "href") + outline.values("link", "href")
    assert {link for link in links if link.startswith("http")} == {
        "https://arxiv.org/abs/1602.08007"
    }
    assert all(source.startswith("data:") for source in outline.values("img", "src"))
    assert not outline.values("script", "src")
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page.replace("url(#${clip})", ""))


def test_charts_carry_the_mean_and_the_range_over_seeds() -> None:
    runs = [record(seed=seed, start=start) for seed, start in ((0, 1.0), (1, 3.0))]
    (curve,) = charts(render(runs, {}))[0]["curves"]
    assert curve["seeds"] == 2
    assert [curve["train_nll"][row][0] for row in ("mean", "low", "high")] == [2, 1, 3]
    assert curve["epoch"] == list(range(11))
    assert curve["seconds"][2] == 3.0


def test_one_seed_needs_no_range() -> None:
    (curve,) = charts(render([record()], {}))[0]["curves"]
    assert set(curve["train_nll"]) == {"mean"}


def test_a_fixed_gaussian_is_shown_by_its_error() -> None:
    shown = charts(render([record("faces", output="gaussian")], {}))[0]["quantities"]
    assert [quantity["key"] for quantity in shown] == ["error"]
    shown = charts(render([record("mnist-ae", output="learned-gaussian")], {}))[0]["quantities"]
    assert [quantity["key"] for quantity in shown] == ["nll", "error"]


@pytest.mark.parametrize(
    ("finals", "text"),
    [
        ({1e-3: 0.3, 1e-2: 0.1}, "highest tried"),
        ({1e-3: 0.1, 1e-2: 0.3}, "lowest tried"),
        ({1e-3: None, 1e-2: None}, "all diverged"),
    ],
)
def test_flags_beside_the_best_step(finals: dict[float, float | None], text: str) -> None:
    page = " ".join(render(grid(finals), {}).split())
    assert re.search(rf'class="flag"[^>]*>\s*{text}', page)


def test_diverged_steps_are_marked_in_the_grid() -> None:
    page = render(grid({1e-3: 0.3, 1e-2: 0.1, 1e-1: None}), {})
    assert page.count('aria-label="diverged">×') == 1
    assert 'class="flag"' not in page


def test_seeds_that_diverged_at_the_best_step_are_told() -> None:
    runs = grid({1e-3: 0.3, 1e-2: 0.1, 1e-1: 0.2})
    runs += [record(lr=1e-2, seed=seed, diverged=True) for seed in (1, 2)]
    page = " ".join(render(runs, {}).split())
    assert re.search(r'class="flag"[^>]*>2 of 3 seeds diverged', page)


def test_step_sizes_are_written_as_powers_of_ten() -> None:
    page = render(grid({1e-3: 0.3, 2e-2: 0.1}), {})
    assert "10<sup>−3</sup>" in page
    assert "2·10<sup>−2</sup>" in page


def test_pictures_are_named_and_measured() -> None:
    run = record("faces", algorithm="QDOP", output="gaussian", pictures=pictures(51))
    page = render([run], {})
    assert "4 reconstructions by QDOP" in page
    assert "0.0400" in page
    assert len(Outline(page).values("img", "src")) == 2


def test_timing_stands_beside_the_papers() -> None:
    page = render([], timing(1.87))
    for text in ("1.87", "68.01", "2.34", "a processor"):
        assert text in page


def test_inversion_shows_the_same_two_steps_on_both_sides() -> None:
    runs = grid({1e-3: 0.1, 1e-2: 0.2, 1e-1: 0.3}, experiment="inversion", variant="original")
    runs += grid({1e-3: 0.3, 1e-2: 0.2, 1e-1: 0.1}, experiment="inversion", variant="inverted")
    every = lines(runs)
    assert [plotted(line, every) for line in every] == [{"best": 1e-3, "second": 1e-2}] * 2


def test_an_experiment_of_ones_own_gets_a_section() -> None:
    found = [part["name"] for part in sections([record("mine")])]
    assert found == [*(e.name for e in EXPERIMENTS), "mine"]


def test_names_cannot_break_out_of_the_page() -> None:
    page = render([record("mnist", algorithm="</script><script>alert(1)</script>")], {})
    assert "<script>alert" not in page
    assert charts(page)[0]["algorithms"] == ["</script><script>alert(1)</script>"]


def test_facts_count_what_there_is() -> None:
    runs: list[Record] = grid({1e-2: 0.2, 1e-1: None})
    assert facts(runs)[:4] == ["2 runs", "1 diverged", "10 epochs", "1 seed"]
    assert facts([]) == []


def test_the_sweeps_own_runs_count_and_all_their_seeds() -> None:
    def stored(scale: str, seed: int) -> Run:
        about = {"experiment": "mnist", "variant": "tanh", "algorithm": "DOP", "lr": 0.1}
        config = {**about, "seed": seed, "scale": scale}
        line = {"epoch": 0, "seconds": 0.0, "train_nll": None}
        return Run(f"{scale}-{seed}", config, [line], {"status": "diverged"}, {})

    runs = [stored("small", 0), stored("small", 1), stored("paper", 0)]
    cells = [{"lrs": [{"id": "small-0"}]}]
    found = records(Collection(runs, {"mnist": {"cells": cells}}, None))
    assert [(run.config["scale"], run.seed) for run in found] == [("small", 0), ("small", 1)]
    (paper,) = records(Collection(runs, {}, None))
    assert paper.config["scale"] == "paper"
    assert paper.final() == float("inf")


def test_a_smaller_scale_is_said_to_be_one() -> None:
    assert "at small scale" in render([record(scale="small")], {})
    assert "take the verdicts as indications" not in render([record(scale="paper")], {})
