"""Shows results as Markdown tables and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from quasidiag.experiments.config import UsageError

#: Races side by side in a picture.
ACROSS = 3


def tables(results: dict[str, Any]) -> str:
    """All tables, as Markdown."""
    machine = ", ".join(f"{k} {v}" for k, v in results["machine"].items())
    machine += f"; {results['clock']} time"
    parts = [machine, _update(results["update"])]
    parts += [_race(race) for race in results["races"]]
    parts += [_curve(curve) for curve in results["curves"]]
    parts += [_amortised(found) for found in results.get("amortised", ())]
    if results.get("not_installed"):
        parts.append("\n".join(f"- {k}: {v}" for k, v in results["not_installed"].items()))
    return "\n\n".join(parts)


def insert(results: dict[str, Any], page: str) -> str:
    """``page`` with its tables of this preset replaced by those of ``results``."""
    before, after = parts(page, results["preset"])
    return f"{before}\n\n{tables(results)}\n\n{after}"


def parts(page: str, preset: str) -> tuple[str, str]:
    """The parts of ``page`` before and after the tables of ``preset``, including the comments that mark their place."""
    head, mark, rest = page.partition(f"<!-- bench {preset} -->")
    _, end, tail = rest.partition("<!-- end -->")
    if not end:
        raise UsageError(f"the page has no <!-- bench {preset} --> … <!-- end -->")
    return head + mark, end + tail


def _race(race: dict[str, Any]) -> str:
    rows = []
    for name, e in sorted(race["contenders"].items(), key=lambda item: item[1]["ratio"]):
        floor = f"{e['floor_multiplications']:.2f}" if "floor" in e else ""
        with_bytes = f"{e['floor']:.2f}" if "floor" in e else ""
        state = e.get("state_bytes_per_parameter")
        peak = e.get("peak_bytes_over_base")
        rows.append(
            [
                name,
                f"{e['median_ms']:.2f}",
                f"{e['ratio']:.2f}",
                f"{e['ratio_low']:.2f}–{e['ratio_high']:.2f}",
                f"{e['ratio_of_least']:.2f}",
                floor,
                with_bytes,
                "" if state is None else f"{state / 4:.2f}",
                "" if peak is None else f"{peak / 2**20:+.1f}",
            ]
        )
    head = ["", "ms", f"over {race['base']}", "quartiles", "of the least", "floor (mult.)"]
    head += ["floor (mult. + bytes)", "numbers a parameter", "peak MiB"]
    lines = [f"**{race['workload']}**", "", _markdown(head, rows)]
    lines += ["", *(f"- {name}: {why}" for name, why in race["failed"].items())]
    return "\n".join(lines).rstrip()


def _curve(curve: dict[str, Any]) -> str:
    sizes = [int(p[0]) for p in next(iter(curve["points"].values()))]
    rows = [
        [name, *(f"{p[1]:.2f} ({p[3]:.2f})" for p in points)]
        for name, points in curve["points"].items()
    ]
    head = [f"ms (over SGD) against {curve['axis']}", *map(str, sizes)]
    return _markdown(head, rows)


def _amortised(found: dict[str, Any]) -> str:
    head = [f"{found['dataset']}, lr {found['lr']:g}: training loss after epoch"]
    head += ["farthest from the full metric"]
    epochs = len(next(iter(found["losses"].values())))
    rows = [
        [name, f"{100 * found['departure'][name]:.1f} %", *(f"{v:.4f}" for v in values)]
        for name, values in found["losses"].items()
    ]
    return _markdown([*head, *map(str, range(1, epochs + 1))], rows)


def _update(update: dict[str, Any]) -> str:
    rows = [
        [name, f"{e['median_ms']:.3f}", f"{100 * e['share_of_copy']:.0f} %"]
        for name, e in update["kernels"].items()
    ]
    shape = "×".join(map(str, update["shape"]))
    copy = update["copy_bytes_per_ms"] / 1e6
    return _markdown([f"update of {shape} alone", "ms", f"of a copy's {copy:.1f} GB/s"], rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in table]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw a bar per contender with its floor, and below them the cost curves, if there are any."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    races, curves = results["races"], results["curves"]
    across = min(len(races), ACROSS)
    rows = math.ceil(len(races) / ACROSS)
    heights = [4.2] * rows + [3.0] * bool(curves)
    figure = plt.figure(figsize=(max(7, 3.6 * max(across, len(curves))), sum(heights)))
    grid = figure.add_gridspec(len(heights), 12, height_ratios=heights, hspace=0.45, wspace=3.0)
    for i, race in enumerate(races):
        width = 12 // across
        left = i % across * width + (i % across > 0)  # room for the contenders' names
        right = (i % across + 1) * width
        _bars(figure.add_subplot(grid[i // across, left:right]), race)
    for i, curve in enumerate(curves):
        width = 12 // len(curves)
        _lines(figure.add_subplot(grid[-1, i * width : (i + 1) * width]), curve, legend=i == 0)
    figure.savefig(
        path,
        bbox_inches="tight",
        dpi=150,
        metadata={"Date": None} if path.suffix == ".svg" else None,
    )


def _bars(axes: Any, race: dict[str, Any]) -> None:
    entries = sorted(race["contenders"].items(), key=lambda item: -item[1]["ratio"])
    names = [name for name, _ in entries]
    ratios = [e["ratio"] for _, e in entries]
    ours = [name != "SGD" and ("floor" in e or "(auto)" in name) for name, e in entries]
    axes.barh(names, ratios, color=["#3b6ea5" if own else "#b8bec7" for own in ours], height=0.7)
    floors = race["base"] == "SGD"  # floors are ratios to SGD's floor
    for y, (_, e) in enumerate(entries):
        end = e["ratio"]
        if floors and "floor" in e:
            axes.plot([e["floor"]] * 2, [y - 0.4, y + 0.4], color="#d1495b", lw=1.5)
            end = max(end, e["floor"])
        axes.text(end * 1.03, y, f"{e['ratio']:.2f}", va="center", fontsize=7)
    if max(ratios) > 6:
        axes.set_xscale("log")
        axes.set_xlim(0.7, max(ratios) * 1.8)
    else:
        axes.set_xlim(0, max(ratios) * 1.15)
    axes.set_title(race["workload"], fontsize=9)
    note = " (red: counted floor)" if floors else ""
    axes.set_xlabel(f"step time over {race['base']}{note}", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Any, curve: dict[str, Any], legend: bool) -> None:
    for name, points in curve["points"].items():
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", ms=3, lw=1, label=name)
    axes.set_xlabel(curve["axis"], fontsize=8)
    axes.set_ylabel("ms a step", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=6, frameon=False)
