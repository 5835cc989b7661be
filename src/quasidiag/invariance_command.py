"""Which optimizers are invariant to which change of representation, measured by training twins.

A small sigmoid classifier is trained beside its twin, the same function with its inputs and activities encoded in
another way, on the same minibatches in float64. The table gives the largest difference between their outputs, relative to
how far training took them: 1e-10 is rounding, 1 is another network. The paper's algorithms run without eps and floor,
which by default are 1e-8 and break the invariance where the metric is as small.

Options of an optimizer that is given by import path are written as key=value. Exit codes: 0 done, 1 an optimizer failed
or did not keep what --require asks for, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import quasidiag as qd
from quasidiag import invariance
from quasidiag.experiments import progress
from quasidiag.experiments.commands import options as shared
from quasidiag.experiments.config import UsageError
from quasidiag.user_code import blamed, found_from

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Make = Callable[[nn.Module, Any], Optimizer]

#: An optimizer counts as invariant to a change if the twins' relative difference is below this.
KEPT = 1e-6
#: Smaller differences are drawn as this one: 0 has no logarithm.
FLOOR = 1e-16

#: These differ from the defaults: ``eps`` and ``floor`` break the invariance by as much as they matter. The automatic step
#: takes a tenth of its length, because long steps, though as invariant, amplify rounding from step to step.
PAPERS: dict[str, Any] = {"gamma": 0.05, "eps": 0.0, "floor": 0.0}
AUTOMATIC: dict[str, Any] = {"lr": 0.1}


def _preset(kind: Any, lr: float) -> Make:
    return lambda net, loss: kind(net, loss, lr=lr, **PAPERS)


def _auto(**options: Any) -> Make:
    return lambda net, loss: qd.Riemannian(net, loss, step="auto", **AUTOMATIC, **options)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda net, loss: torch.optim.SGD(net.parameters(), lr=0.3),
    "Adam": lambda net, loss: torch.optim.Adam(net.parameters(), lr=1e-2),
    "AdaGrad": lambda net, loss: qd.AdaGrad(net.parameters(), lr=1e-2),
    "DOP": _preset(qd.DOP, lr=1e-3),
    "DNat": _preset(qd.DNat, lr=1e-3),
    "QDOP": _preset(qd.QDOP, lr=1e-2),
    "QDMCNat": _preset(qd.QDMCNat, lr=1e-2),
    "QDNat": _preset(qd.QDNat, lr=1e-2),
    "Riemannian (auto)": _auto(),
    "Riemannian (auto, no safeguards)": _auto(safeguard=None),
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "invariance",
        help="measure which optimizers depend on how the data is encoded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--optimizer",
        metavar="MODULE:CLASS",
        help="a torch.optim.Optimizer by import path, beside the usual ones",
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="that optimizer's options")
    parser.add_argument("--only", action="store_true", help="measure the given optimizer alone")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of data, network and random changes")
    parser.add_argument(
        "--require",
        choices=sorted(invariance.CHANGES),
        help="exit with 1 unless everything measured is invariant to this",
    )
    parser.add_argument(
        "--plot", type=shared.picture, metavar="FILE", help="draw a picture (.png, .svg)"
    )
    parser.add_argument("--json", type=shared.output, metavar="FILE", help="write the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, draw; returns the exit code."""
    if arguments.steps < 1:
        raise UsageError(f"--steps must be at least 1, not {arguments.steps}")
    makers = {} if arguments.only else dict(OPTIMIZERS)
    if arguments.optimizer:
        makers[arguments.optimizer] = given(arguments.optimizer, options(arguments.settings))
    elif arguments.only or arguments.settings:
        raise UsageError("--only and KEY=VALUE are about an --optimizer MODULE:CLASS")
    drifts: dict[str, dict[str, invariance.Drift]] = {}
    for name, make in makers.items():
        with found_from(name.partition(":")[0]), blamed(name):
            drifts[name] = {
                change: measure(make, change, arguments.steps, arguments.seed)
                for change in invariance.CHANGES
            }
    table = {name: {c: relative(d) for c, d in row.items()} for name, row in drifts.items()}
    show(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")
    if arguments.plot is not None:
        draw(table, drifts, arguments.plot)
        print(f"wrote {arguments.plot}")
    failed = [name for name, row in table.items() if not all(map(math.isfinite, row.values()))]
    if failed:
        print(f"did not train: {', '.join(failed)}")
    broken = [
        name
        for name, row in table.items()
        if arguments.require is not None and not row[arguments.require] < KEPT
    ]
    if broken:
        print(f"not invariant to {arguments.require}: {', '.join(broken)}")
    return int(bool(failed or broken))


def given(path: str, settings: dict[str, Any]) -> Make:
    """A function that makes the optimizer at an import path, from the model if it is quasidiag's, else its parameters."""
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise UsageError(f"expected MODULE:CLASS, such as torch.optim:Adam, not {path!r}")
    with found_from(module_name), blamed(path):
        kind = getattr(importlib.import_module(module_name), name, None)
    if kind is None:
        raise UsageError(f"cannot import {path!r}: {module_name} has no {name}")
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UsageError(f"{path} is not a torch.optim.Optimizer")
    plain: Any = kind
    riemannian = issubclass(kind, qd.Riemannian)

    def make(net: nn.Module, loss: Any) -> Optimizer:
        try:
            if riemannian:
                return plain(net, loss, **settings)
            return plain(net.parameters(), **settings)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path} cannot be made with these options: {error}") from error

    return make


def options(settings: list[str]) -> dict[str, Any]:
    """``key=value`` as keyword arguments; values are read as Python literals, or else as text."""
    found = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not (equals and key.isidentifier()):
            raise UsageError(f"expected KEY=VALUE, not {setting!r}")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def problem(seed: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A sigmoid network, inputs in [0, 1], and the classes that a second random network assigns to them."""
    generator = torch.Generator().manual_seed(seed)

    def network(*sizes: int, gain: float) -> nn.Sequential:
        modules: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layer = nn.Linear(fan_in, fan_out, dtype=torch.float64)
            with torch.no_grad():
                for p in layer.parameters():
                    noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                    p.copy_(gain * noise / fan_in**0.5)
            modules += [layer, nn.Sigmoid()]
        return nn.Sequential(*modules[:-1])

    x = torch.rand(1200, 20, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        t = network(20, 16, 5, gain=6.0)(x - 0.5).argmax(1)
    return network(20, 12, 10, 5, gain=1.0), x, t


def measure(make: Make, change: str, steps: int, seed: int) -> invariance.Drift:
    """Train the twins on minibatches of 300."""
    model, x, t = problem(seed)
    other = invariance.CHANGES[change](model)
    criterion = qd.Categorical()
    return invariance.measure(make, model, criterion, other, x, t, steps=steps, batch_size=300)


def relative(drift: invariance.Drift) -> float:
    """The twins' largest difference, relative to how far training moved them; NaN if it failed or moved nothing."""
    way = max(drift.moves)
    if not all(map(math.isfinite, (*drift.differences, way))) or way == 0:
        return math.nan
    return drift.worst / way


def note(table: dict[str, dict[str, float]]) -> str:
    """The options of our own optimizers in the table that differ from the defaults, as a line of text."""
    if not table.keys() & OPTIMIZERS.keys():
        return ""
    papers, automatic = (
        ", ".join(f"{key}={value:g}" for key, value in some.items()) for some in (PAPERS, AUTOMATIC)
    )
    return f"not by default: {papers} (DOP, DNat, QDOP, QDMCNat, QDNat); {automatic} (Riemannian)"


def show(table: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    rows = [(name, *(_cell(row[c]) for c in invariance.CHANGES)) for name, row in table.items()]
    title = "largest difference between the twins' outputs, relative to how far training moved them"
    progress.table(("optimizer", *invariance.CHANGES), rows, title)
    if note(table):
        print(note(table))


def _cell(value: float) -> str:
    return f"{value:.0e} {'kept' if value < KEPT else 'no'}" if math.isfinite(value) else "failed"


def draw(
    table: dict[str, dict[str, float]],
    drifts: dict[str, dict[str, invariance.Drift]],
    path: Path,
) -> None:
    """Draw the table as colours, and beside it how far the twins drift apart under an affine change, step by step."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 12}):
        figure = Figure(figsize=(12, 2.2 + 0.42 * max(6, len(table))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _draw_table(left, table)
        _draw_drifts(right, {name: twins["affine"] for name, twins in drifts.items()})
        figure.supxlabel(note(table), fontsize=11, x=0.01, ha="left")
        figure.savefig(path, dpi=120)


def _draw_table(axis: Axes, table: dict[str, dict[str, float]]) -> None:
    changes = list(invariance.CHANGES)
    values = [
        [math.log10(max(row[c], FLOOR)) if math.isfinite(row[c]) else 0.0 for c in changes]
        for row in table.values()
    ]
    axis.imshow(values, cmap="RdYlGn_r", vmin=-14, vmax=0, aspect="auto")
    axis.set_xticks(range(len(changes)), [change.replace(" ", "\n", 1) for change in changes])
    axis.set_yticks(range(len(table)), list(table))
    axis.set_title("Largest difference between the twins' outputs")
    for y, row in enumerate(table.values()):
        for x, change in enumerate(changes):
            text = f"{row[change]:.0e}" if math.isfinite(row[change]) else "failed"
            dark = not 1e-13 < row[change] < 1e-2
            axis.text(x, y, text, ha="center", va="center", color="wk"[not dark])


def _draw_drifts(axis: Axes, drifts: dict[str, invariance.Drift]) -> None:
    """The difference after each step. Those that are not invariant lie on each other, so they share a colour and a name."""
    others = "not invariant"
    for name, drift in sorted(drifts.items(), key=lambda item: not relative(item[1]) < KEPT):
        way = max(drift.moves) or 1.0
        parts = [max(d / way, FLOOR) for d in drift.differences]
        steps = range(1, len(parts) + 1)
        if relative(drift) < KEPT:
            axis.semilogy(steps, parts, lw=1.8, label=name)
        else:
            axis.semilogy(steps, parts, color="#a0a0a0", lw=1, label=others)
            others = ""
    axis.axhline(KEPT, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("Training steps")
    axis.set_title("Under an affine change, step by step")
    axis.set_ylabel("Difference, relative to how far training moved them")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
