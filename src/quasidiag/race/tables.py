"""The summaries as tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .contenders import OURS
from .summary import PARTS, REFERENCE
from .timing import Pace, elapsed


def tables(summaries: Sequence[dict[str, Any]]) -> str:
    """All tables that have data, one after the other."""
    known = [s for s in summaries if s["contenders"]]
    kinds = (steps, finals, unseen, errors, times, paces, starts, robustness)
    parts = [kind(known) for kind in kinds]
    return "\n\n".join(part for part in parts if part) + "\n"


def names(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Every contender in any of the summaries, in order."""
    return list(dict.fromkeys(row["contender"] for s in summaries for row in s["contenders"]))


def finals(summaries: Sequence[dict[str, Any]]) -> str:
    """The loss after one epoch and at the end; the best of a task is bold."""
    columns = names(summaries)
    lines = [("task", "epochs", *columns)]
    for s in summaries:
        rows = {row["contender"]: row for row in s["contenders"]}
        first = min(row["first"] for row in rows.values())
        last = min(row["final"] for row in rows.values())
        cells = [
            f"{_bold(rows[c]['first'], first)} → {_bold(rows[c]['final'], last)}"
            if c in rows
            else ""
            for c in columns
        ]
        lines.append((s["title"], str(s["epochs"]), *cells))
    return _titled("Training loss after the first epoch → the last", lines)


def unseen(summaries: Sequence[dict[str, Any]]) -> str:
    """The loss on validation data, of runs that were chosen by their training loss."""
    columns = names(summaries)
    lines = [("task", *columns)]
    for s in summaries:
        rows = {row["contender"]: row["unseen"] for row in s["contenders"]}
        best = {part: _least(row[part] for row in rows.values()) for part in ("lowest", "final")}
        cells = [
            " → ".join(_bold(rows[c][part], value) for part, value in best.items())
            if c in rows
            else ""
            for c in columns
        ]
        lines.append((s["title"], *cells))
    return _titled("Validation loss: the lowest after an epoch → the last", lines)


def errors(summaries: Sequence[dict[str, Any]]) -> str:
    """The share of validation data that classifiers get wrong at the end."""
    known = [s for s in summaries if s["kind"] == "classifier"]
    columns = names(known)
    lines = [("task", *columns)]
    for s in known:
        rows = {row["contender"]: row["unseen"]["errors"] for row in s["contenders"]}
        rows = {c: None if x is None else 100 * x for c, x in rows.items()}
        best = _least(rows.values())
        lines.append((s["title"], *(_bold(rows[c], best) if c in rows else "" for c in columns)))
    return (
        _titled("Validation errors of classifiers at the end, in per cent", lines) if known else ""
    )


def steps(summaries: Sequence[dict[str, Any]]) -> str:
    """Steps to the final loss of tuned AdamW, as a share of AdamW's steps."""
    columns = [name for name in names(summaries) if name != REFERENCE]
    lines = [("task", f"{REFERENCE}'s steps", "to a loss of", *columns)]
    for s in summaries:
        rows = {row["contender"]: row for row in s["contenders"]}
        if REFERENCE in rows:
            total = str(s["epochs"] * s["steps_per_epoch"])
            cells = [_share(rows.get(c)) for c in columns]
            lines.append((s["title"], total, _number(rows[REFERENCE]["final"]), *cells))
    title = f"Steps to the loss that tuned {REFERENCE} ends with, as a share of {REFERENCE}'s"
    return _titled(title, lines) if len(lines) > 1 else ""


def times(summaries: Sequence[dict[str, Any]]) -> str:
    """Seconds to the losses that the slowest contender has at 10, 50 and 100 % of its run."""
    timed = [s for s in summaries if s["timing"]]
    if not timed:
        return ""
    columns = names(timed)
    lines = [("task", "level", "loss", *columns)]
    for s in timed:
        rows = {row["contender"]: row for row in s["contenders"]}
        for part in map(str, PARTS):
            seconds = {c: row["levels"][part]["seconds"] for c, row in rows.items()}
            best = _least(seconds.values())
            level = _number(next(iter(rows.values()))["levels"][part]["loss"])
            cells = [_bold(seconds.get(c), best) if c in rows else "" for c in columns]
            lines.append((s["title"], f"{float(part):.0%}", level, *cells))
    title = "Seconds to the losses that the slowest reaches at 10, 50 and 100 % of its run"
    return _titled(title, lines)


def paces(summaries: Sequence[dict[str, Any]]) -> str:
    """How long a step takes, after the first ones."""
    return _paces(summaries, "The time of a step, in milliseconds", lambda pace: pace["then"])


def starts(summaries: Sequence[dict[str, Any]]) -> str:
    """The mean time of the first four steps, in each of which ours measures its metric and model."""
    title = "The mean of the first four steps, in milliseconds"
    return _paces(summaries, title, lambda pace: elapsed(pace, 4) / 4)


def _paces(
    summaries: Sequence[dict[str, Any]], title: str, seconds: Callable[[Pace], float]
) -> str:
    timed = [s for s in summaries if s["timing"]]
    columns = [name for name in names(timed) if any(name in s["timing"] for s in timed)]
    lines = [("task", *columns)]
    for s in timed:
        known = [s["timing"].get(c) for c in columns]
        cells = ["" if pace is None else _number(1000 * seconds(pace)) for pace in known]
        lines.append((s["title"], *cells))
    return _titled(title, lines) if timed else ""


def robustness(summaries: Sequence[dict[str, Any]]) -> str:
    """Our losses at other factors, with other minibatch sizes, and with the metric on a share of each minibatch."""
    tested = [s for s in summaries if s["robustness"]]
    if not tested:
        return ""
    keys = list(dict.fromkeys(_key(s, row) for s in tested for row in s["robustness"]))
    lines = [("task", "epochs", *keys)]
    for s in tested:
        cells = {
            _key(s, row): _number(row["loss"]) if row["status"] == "finished" else "diverged"
            for row in s["robustness"]
        }
        epochs = str(s["robustness"][0]["epochs"])
        lines.append((s["title"], epochs, *(cells.get(key, "") for key in keys)))
    return _titled(f"Training loss of {OURS} at other factors, minibatch sizes and shares", lines)


def _key(summary: dict[str, Any], row: dict[str, Any]) -> str:
    other = row["batch_size"] != summary["batch_size"]
    if row["share"]:
        return f"metric on {row['share']:g}"
    return f"batch {row['batch_size']}" if other else f"factor {row['factor']:g}"


def _share(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["ratio"] is None:
        return "not reached"
    return f"{100 * row['ratio']:.{0 if row['ratio'] >= 0.1 else 1}f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _least(values: Iterable[float | None]) -> float | None:
    return min((x for x in values if x is not None), default=None)


def _bold(value: float | None, best: float | None) -> str:
    return f"**{_number(value)}**" if value is not None and value == best else _number(value)


def _titled(title: str, lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---"] + ["---:"] * (len(head) - 1)
    text = "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))
    return f"**{title}**\n\n{text}"
