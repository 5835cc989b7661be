"""`quasidiag report RUNS`: one HTML page that opens offline, and the figures beside it."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from . import claims, figures, report_page
from .algorithms import ALGORITHMS
from .report_runs import VARIANT_NAMES, Record, lines, records

MARKS = {claims.HOLDS: "yes", claims.FAILS: "no", claims.OPEN: "open"}


def write(runs: Path, out: Path) -> Path:
    """Write the report of a runs directory, or of an export of one, into `out`.

    Returns the path of the page, `out/report.html`; the figures go to `out/figures`.
    """
    from .runs import load

    collection = load(runs)
    found = records(collection)
    unfinished = sum(not run.result for run in collection.runs)
    out.mkdir(parents=True, exist_ok=True)
    figures.write(found, collection.timing or {}, out / "figures")
    page = out / "report.html"
    page.write_text(render(found, collection.timing or {}, unfinished), encoding="utf-8")
    return page


def render(found: list[Record], timing: dict[str, Any], unfinished: int = 0) -> str:
    """The HTML of the page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"json": _json, "power": _power, "variant": _variant, "colour": _colour}
    assets = files("quasidiag.experiments")
    widest = {
        device: 1.02 * max(max(row["ratio"], row["paper_ratio"] or 0) for row in table["rows"])
        for device, table in timing.items()
    }
    return environment.from_string(_text(assets / "report.html")).render(
        css=Markup(_text(assets / "report.css")),
        js=Markup(_text(assets / "report.js")),
        summary=_summary(found, unfinished),
        findings=claims.judge(lines(found), timing),
        marks=MARKS,
        min_epochs=claims.MIN_EPOCHS,
        smaller=" and ".join(sorted({str(run.config.get("scale")) for run in found} - {"paper"})),
        sections=report_page.sections(found),
        timing=timing,
        widest=widest,
    )


def _text(resource: Any) -> str:
    return resource.read_text(encoding="utf-8")


def _summary(found: list[Record], unfinished: int) -> list[str]:
    texts = report_page.facts(found) or ["no finished runs"]
    return texts + ([f"{unfinished} unfinished, left out"] if unfinished else [])


def _json(value: Any) -> Markup:
    """JSON that is safe inside a script element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _power(lr: float) -> Markup:
    """A step size in HTML, written as a power of ten, with a factor in front where it is not an exact power."""
    exponent = math.floor(math.log10(lr) + 1e-9)
    digit = lr / 10**exponent
    factor = "" if abs(digit - 1) < 1e-6 else f"{digit:.3g}·"
    return Markup("{}10<sup>{}</sup>").format(factor, str(exponent).replace("-", "−"))


def _variant(name: str) -> str:
    return VARIANT_NAMES.get(name, name)


def _colour(algorithm: str) -> str:
    return algorithm if algorithm in ALGORITHMS else "other"
