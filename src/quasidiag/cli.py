"""The command ``quasidiag``: a table of subcommands, each in a module of its own.

Such a module has ``add_parser(subparsers)``, which sets ``run`` (a function of the parsed arguments
that returns the exit code) by ``set_defaults``; a command with an argument ``settings`` also takes
``key=value`` anywhere. Only the module of the command that was called is imported, so what one of
them needs cannot break another. Exit codes: 0 done, 1 failed (or nothing but divergence), 2 wrong
usage or data, 3 stopped by a time limit.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import quasidiag

#: Command → module and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("quasidiag.experiments.demo", "compare the eight algorithms on handwritten digits"),
    "list": ("quasidiag.experiments.commands.listing", "list experiments, algorithms and datasets"),
    "run": ("quasidiag.experiments.commands.run", "train one network with one algorithm"),
    "reproduce": (
        "quasidiag.experiments.commands.reproduce",
        "redo figures and tables of the paper",
    ),
    "bench": (
        "quasidiag.bench.command",
        "time training steps beside the floor of their arithmetic",
    ),
    "race": ("quasidiag.race.command", "race the untuned optimizer against tuned peers"),
    "invariance": (
        "quasidiag.invariance_command",
        "measure which optimizers depend on how the data is encoded",
    ),
    "doctor": ("quasidiag.doctor", "say what of a model would be preconditioned, and what not"),
    "timing": ("quasidiag.experiments.timing", "time all algorithms against SGD (Table 1)"),
    "report": ("quasidiag.experiments.commands.reporting", "write the report of a folder of runs"),
    "export": ("quasidiag.experiments.commands.exporting", "pack a folder of runs into one file"),
    "data": ("quasidiag.experiments.commands.data", "fetch, check and prepare the datasets"),
}


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; only the one named by ``command`` is given its arguments."""
    main_parser = argparse.ArgumentParser(
        prog="quasidiag",
        description=f"{quasidiag.__doc__} The paper's experiments, and instruments.",
    )
    main_parser.add_argument("--version", action="store_true", help="print the version and stop")
    subparsers = main_parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, description) in COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=description, add_help=False)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in argv if not word.startswith("-")), None)
    try:
        main_parser = parser(command if command in COMMANDS else None)
        arguments, rest = main_parser.parse_known_args(argv)
        if rest and not ("settings" in arguments and all("=" in word for word in rest)):
            main_parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.settings = [*getattr(arguments, "settings", ()), *rest]
        if arguments.version:
            print(quasidiag.__version__)
            return 0
        if arguments.command is None:
            parser().print_help()
            return 2
        return int(arguments.run(arguments) or 0)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("quasidiag"):
            raise
        return _fail(f"{command} needs {error.name}: pip install '.[experiments]' in a checkout")
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not _expected(error):
            raise
        return _fail(str(error))


def _expected(error: Exception) -> bool:
    """Whether the message alone tells the user what to do."""
    from quasidiag.experiments.config import UsageError
    from quasidiag.experiments.files import DataError

    return isinstance(error, (UsageError, DataError))


def _fail(message: str) -> int:
    print(f"quasidiag: error: {message}", file=sys.stderr)
    return 2
