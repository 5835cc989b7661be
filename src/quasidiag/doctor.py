"""Which parameters of a model would be preconditioned, and by which adapter; which would not, and why.

The model is named by import path, as package.module:name (a module, or a function or class that makes one without
arguments), or by a Python file that defines `model` (FILE.py, or FILE.py:name). Exit codes: 0 all trained parameters are
preconditioned, 1 some of them follow the diagonal rule, 2 wrong usage, or a model that cannot be loaded or examined.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import runpy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from quasidiag.blocks import QuasiDiagonalBlock
from quasidiag.experiments.config import UsageError
from quasidiag.layers.base import adapter_of
from quasidiag.units import find_units, kind_of
from quasidiag.user_code import blamed, found_from


@dataclass(frozen=True)
class Finding:
    """Parameters of one layer. ``good``: whether they are in a block, ``None`` if frozen. ``why``: the explanation."""

    name: str
    layer: str
    parameters: int
    good: bool | None
    why: str


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="say what of a model would be preconditioned, and what not",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="SCRIPT-OR-MODEL", help="package.module:name or FILE.py")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Load the model, print a line for each finding, and return the exit code."""
    found = list(examine(load(arguments.model)))
    if not found:
        raise UsageError(f"{arguments.model} has no parameter")
    trained = [finding for finding in found if finding.good is not None]
    if not trained:
        raise UsageError(f"all parameters of {arguments.model} are frozen: nothing is trained")
    widths = [max(len(str(row[i])) for row in _cells(found)) for i in range(3)]
    for finding, cells in zip(found, _cells(found)):
        mark = {True: "yes", False: "NO ", None: "-  "}[finding.good]
        name, layer, count = (cell.ljust(w) for cell, w in zip(cells, widths))
        print(f"{mark}  {name}  {layer}  {count}  {finding.why}")
    total, good = _count(trained), _count(finding for finding in trained if finding.good)
    frozen = _count(found) - total
    rest = f"; {frozen:,} more are frozen" if frozen else ""
    print(f"{good:,} of {total:,} parameters are preconditioned ({good / total:.1%}){rest}")
    return int(good < total)


def _count(found: Iterable[Finding]) -> int:
    return sum(finding.parameters for finding in found)


def _cells(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(x.name, x.layer, f"{x.parameters:,}") for x in found]


def examine(model: nn.Module) -> Iterator[Finding]:
    """What an optimizer of :mod:`quasidiag` would do with each layer of a model."""
    trained = {p for p in model.parameters() if p.requires_grad}
    units = find_units(model, trained, "quasi-diagonal")
    covered = set()
    for block in units.blocks:
        covered |= set(block.parameters)
        count = sum(p.numel() for p in block.parameters)
        adapter = type(adapter_of(block.module)).__name__
        if isinstance(block, QuasiDiagonalBlock):
            why = f"quasi-diagonal, by {adapter}"
        elif block.weight is None or block.bias is None:
            missing = "weight" if block.weight is None else "bias"
            why = f"diagonal, by {adapter}: no {missing} is trained with it"
        else:
            why = f"diagonal, by {adapter}"
        yield Finding(block.name, kind_of(block, model), count, True, why)
    for name, module in model.named_modules():
        left = [(n, p) for n, p in module.named_parameters(recurse=False) if p not in covered]
        for good, why in (
            (None, "frozen: it does not require a gradient"),
            (False, _why_not(module)),
        ):
            some = [(n, p) for n, p in left if p.requires_grad is (good is not None)]
            if some:
                label = ", ".join(".".join(filter(None, (name, n))) for n, _ in some)
                count = sum(p.numel() for _, p in some)
                yield Finding(label, type(module).__name__, count, good, why)
        covered |= {p for _, p in left}


def _why_not(module: nn.Module) -> str:
    if adapter_of(module) is not None:
        return "the diagonal rule of qd.AdaGrad: the adapter of this layer does not cover it"
    if isinstance(module, ParametrizationList):
        return "the diagonal rule of qd.AdaGrad: a parametrization (weight_norm, say) computes the layer's own from it"
    return (
        f"the diagonal rule of qd.AdaGrad: no adapter is registered for {type(module).__name__} "
        "(qd.register_layer teaches one)"
    )


def load(place: str) -> nn.Module:
    """The model at an import path or in a file."""
    path, _, name = place.partition(":")
    with found_from(path), blamed(path):
        model = _made(_named(path, name, place), place)
    if shapeless := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise UsageError(
            f"{place} has lazy layers ({', '.join(shapeless)}), which have no shape yet: let the model see a minibatch first"
        )
    return model


def _named(path: str, name: str, place: str) -> Any:
    """The object with this name in a Python file or a module."""
    if path.endswith(".py"):
        if not os.path.exists(path):
            raise UsageError(f"there is no file {path}")
        name = name or "model"
        names: Any = SimpleNamespace(**runpy.run_path(path, run_name="quasidiag.doctor.script"))
    elif name:
        names = importlib.import_module(path)
    else:
        raise UsageError(f"expected package.module:name or FILE.py, not {place!r}")
    if not hasattr(names, name):  # a package may make its names only when they are asked for
        raise UsageError(f"{path} defines no {name!r}")
    return getattr(names, name)


def _made(model: Any, place: str) -> nn.Module:
    """The model itself, or what a function or class returns when it is called without arguments."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise UsageError(f"{place} is a {type(model).__name__}, not a module")
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise UsageError(f"{place} cannot be called without arguments: {error}") from error
    except ValueError:
        pass  # written in C, without a signature: try the call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{place} gives a {type(model).__name__}, not a module")
    return model
