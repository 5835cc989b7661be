"""The page in a real browser: what is clicked, hovered and typed does what it says."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import pictures, record, timing

from quasidiag.experiments.algorithms import ALGORITHMS
from quasidiag.experiments.report import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("needs Chromium and chromedriver on the path", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.add_argument("--window-size=1280,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    runs = [
        record("mnist", variant, algorithm, seed=seed, rate=0.95 - 0.03 * place, start=2.3 + seed)
        for variant in ("sigmoid", "tanh")
        for place, algorithm in enumerate(ALGORITHMS)
        for seed in (0, 1)
    ]
    runs.append(record("faces", algorithm="QDOP", output="gaussian", pictures=pictures(9)))
    runs.append(
        record("mnist-ae", algorithm="QDOP", output="learned-gaussian", start=-10, rate=1.1)
    )
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(runs, timing()), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Any:
    browser.set_window_size(1280, 1000)
    browser.get(address)
    return browser


def curves(page: Any, panel: int = 0) -> list[str]:
    """Which curves one panel of the MNIST chart shows."""
    script = """return [...document.querySelectorAll('#mnist .panel')[arguments[0]]
        .querySelectorAll('[data-curve]')].map(g => g.dataset.curve)"""
    return page.execute_script(script, panel)


def press(page: Any, selector: str) -> Any:
    button = page.find_element(By.CSS_SELECTOR, f"#mnist {selector}")
    page.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button
    )
    button.click()
    return button


def plot(page: Any, panel: int = 0) -> Any:
    svg = page.find_elements(By.CSS_SELECTOR, "#mnist .panel svg")[panel]
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", svg)
    return svg


def hover(page: Any, part: float) -> str:
    """Put the pointer over the training panel, at a part of its width; gives the tip's text."""
    svg = plot(page)
    box = page.execute_script("return document.querySelector('#mnist figure').chart.panels[0].box")
    x = box["left"] + part * (box["right"] - box["left"]) - svg.rect["width"] / 2
    webdriver.ActionChains(page).move_to_element_with_offset(svg, round(x), 0).perform()
    tip = page.find_element(By.CSS_SELECTOR, "#mnist .tip")
    return tip.text if tip.is_displayed() else ""


def test_opens_offline_and_without_errors(page: Any) -> None:
    assert page.execute_script("return document.documentElement.dataset.ready") == "true"
    assert page.get_log("browser") == []
    fetched = page.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
        ".filter(n => !n.startsWith('data:'))"
    )
    assert fetched == []


def test_first_activation_first(page: Any) -> None:
    expected = [f"{algorithm}|sigmoid|best" for algorithm in ALGORITHMS]
    assert curves(page, 0) == expected
    assert curves(page, 1) == expected


def test_clicking_an_algorithm_hides_and_shows_it(page: Any) -> None:
    chip = press(page, "[data-name=QDOP]")
    assert chip.get_attribute("aria-pressed") == "false"
    assert "QDOP|sigmoid|best" not in curves(page)
    assert len(curves(page, 1)) == len(ALGORITHMS) - 1
    press(page, "[data-name=QDOP]")
    assert chip.get_attribute("aria-pressed") == "true"
    assert len(curves(page)) == len(ALGORITHMS)


def test_clicking_an_activation_adds_its_curves(page: Any) -> None:
    press(page, "[data-name=tanh]")
    assert len(curves(page)) == 2 * len(ALGORITHMS)
    press(page, "[data-name=sigmoid]")
    assert {name.split("|")[1] for name in curves(page)} == {"tanh"}


def test_shift_click_shows_one_alone_and_then_all(page: Any) -> None:
    chip = page.find_element(By.CSS_SELECTOR, "#mnist [data-name=SGD]")
    for expected in (1, len(ALGORITHMS)):
        page.execute_script(
            "arguments[0].dispatchEvent(new MouseEvent('click', {shiftKey: true}))", chip
        )
        assert len(curves(page)) == expected


def test_nothing_selected_says_so(page: Any) -> None:
    press(page, "[data-name=sigmoid]")
    assert curves(page) == []
    assert "nothing selected" in plot(page).text


def test_axes_change(page: Any) -> None:
    path = "return document.querySelector('#mnist .curve').getAttribute('d')"
    seen = {page.execute_script(path)}
    for button in (
        "[data-field=ylog][data-value=false]",
        "[data-field=x][data-value=seconds]",
        "[data-field=xlog][data-value=true]",
        "[data-field=quantity][data-value=error]",
    ):
        assert press(page, button).get_attribute("aria-pressed") == "true"
        seen.add(page.execute_script(path))
    # Seconds are proportional to epochs here, so only three of the four redraw the path.
    assert len(seen) == 4
    assert "seconds of updates" in plot(page).text
    assert "classification error, %" in page.find_element(By.CSS_SELECTOR, "#mnist .panel").text


def test_values_below_zero_get_a_linear_axis(page: Any) -> None:
    svg = page.find_element(By.CSS_SELECTOR, "#mnist-ae .panel svg")
    assert "linear: not all values are positive" in svg.text
    path = svg.find_element(By.CSS_SELECTOR, ".curve").get_attribute("d")
    assert "NaN" not in path
    assert path.count("L") == 10


def test_hovering_reads_the_values(page: Any) -> None:
    text = hover(page, 1.0)
    assert text.startswith("Epoch 10, training")
    rows = [line.split()[0] for line in text.splitlines()[1:]]
    assert rows == list(ALGORITHMS)
    expected = (2.3 + 3.3) / 2 * 0.95**10
    assert f"SGD {expected:.4g}" in text
    assert f"{2.3 * 0.95**10:.4g} … {3.3 * 0.95**10:.4g}" in text
    dots = page.find_elements(By.CSS_SELECTOR, "#mnist .dot")
    assert len(dots) == 2 * len(ALGORITHMS)


def test_leaving_hides_the_values(page: Any) -> None:
    assert hover(page, 0.5)
    heading = page.find_element(By.CSS_SELECTOR, "#mnist h2")
    webdriver.ActionChains(page).move_to_element(heading).perform()
    assert not page.find_element(By.CSS_SELECTOR, "#mnist .tip").is_displayed()
    assert page.find_elements(By.CSS_SELECTOR, "#mnist .dot, #mnist .dim") == []


def test_time_is_read_between_epochs(page: Any) -> None:
    press(page, "[data-field=x][data-value=seconds]")
    assert hover(page, 0.5).startswith("After 7.")


def test_keyboard_reads_and_toggles(page: Any) -> None:
    svg = plot(page)
    svg.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    live = page.find_element(By.CSS_SELECTOR, "#mnist [aria-live]")
    assert live.get_attribute("textContent").startswith("Epoch 1, training")
    svg.send_keys(Keys.END)
    assert live.get_attribute("textContent").startswith("Epoch 10, training")
    svg.send_keys(Keys.ESCAPE)
    assert not page.find_element(By.CSS_SELECTOR, "#mnist .tip").is_displayed()
    page.find_element(By.CSS_SELECTOR, "#mnist [data-name=DOP]").send_keys(Keys.SPACE)
    assert len(curves(page)) == len(ALGORITHMS) - 1


def test_theme_changes_and_is_remembered(page: Any) -> None:
    colour = "return getComputedStyle(document.body).backgroundColor"
    before = page.execute_script(colour)
    page.find_element(By.ID, "theme").click()
    after = page.execute_script(colour)
    assert before != after
    page.refresh()
    assert page.execute_script(colour) == after
    page.find_element(By.ID, "theme").click()
    assert page.execute_script(colour) == before


def test_claims_open_to_their_rule(page: Any) -> None:
    row = page.find_element(By.CSS_SELECTOR, "[data-claim=overhead]")
    assert "holds" in row.text
    assert "times SGD on cpu" not in row.text
    row.find_element(By.CSS_SELECTOR, "summary").click()
    assert "1.90 times SGD on cpu; the paper 1.95" in row.text


def test_pictures_are_drawn(page: Any) -> None:
    widths = page.execute_script(
        "return [...document.querySelectorAll('#faces img')].map(i => i.naturalWidth)"
    )
    assert widths == [4 * 9 + 3 * 2] * 2


@pytest.mark.parametrize("width", [1280, 800, 500])
def test_page_never_scrolls_sideways(page: Any, width: int) -> None:
    page.set_window_size(width, 900)
    assert page.execute_script(
        "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert len(curves(page)) == len(ALGORITHMS)


def test_labels_stay_inside_and_apart(page: Any) -> None:
    boxes = page.execute_script(
        """const svg = document.querySelector('#mnist .panel svg').getBoundingClientRect();
        return [...document.querySelectorAll('#mnist .panel:first-child .label')].map(t => {
          const b = t.getBoundingClientRect();
          return [b.top - svg.top, svg.right - b.right]; })"""
    )
    assert len(boxes) == len(ALGORITHMS)
    tops = sorted(top for top, _ in boxes)
    assert all(room >= 0 for _, room in boxes)
    assert all(b - a > 10 for a, b in itertools.pairwise(tops))
