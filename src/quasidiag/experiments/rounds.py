"""Does pending runs in rounds until none are left, printing progress; shared by the commands that sweep."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from .config import Config
from .pool import Outcome
from .progress import progress

#: Exit code when a time limit stopped the runs.
STOPPED = 3


def label(config: Config) -> str:
    """A short description of a run."""
    seed = f" seed {config.seed}" if config.seed else ""
    return f"{config.experiment} {config.variant} {config.algorithm} lr={config.lr:g}{seed}"


def announce(configs: Sequence[Config]) -> None:
    """Print the runs that would be done."""
    for config in configs:
        print(f"{config.id}  {label(config)} epochs={config.epochs}")
    print(f"{len(configs)} runs now; step sizes beyond the grid and further seeds follow as needed")


def until_done(
    pending: Callable[[], Sequence[Config]],
    run: Callable[[Sequence[Config]], Iterable[Outcome]],
    select: Callable[[str], str],
    after: Callable[[], object] = lambda: None,
) -> int:
    """Do rounds of ``pending`` runs until none are left; return the exit code.

    ``select`` gives the metric by which an experiment is judged, which is printed; ``after`` is called after each round.
    """
    number = 0
    while configs := pending():
        number += 1
        errors, stopped = [], 0
        with progress(f"round {number}", len(configs)) as advance:
            for outcome in run(configs):
                if outcome.error is not None:
                    errors.append(outcome)
                elif outcome.result is None:
                    stopped += 1
                else:
                    advance(f"{label(outcome.config)}: {_ending(outcome, select)}")
        after()
        if errors:
            for outcome in errors[:3]:
                print(f"{label(outcome.config)} failed:\n{outcome.error}", file=sys.stderr)
            print(f"{len(errors)} runs failed; the same command tries them again", file=sys.stderr)
            return 1
        if stopped:
            print(f"time limit: {stopped} runs are unfinished; the same command goes on with them")
            return STOPPED
    return 0


def _ending(outcome: Outcome, select: Callable[[str], str]) -> str:
    assert outcome.result is not None
    key = select(outcome.config.experiment)
    value = outcome.result["final"].get(key)
    return f"{outcome.result['status']}, {key} " + (
        "not finite" if value is None else f"{value:.4g}"
    )
