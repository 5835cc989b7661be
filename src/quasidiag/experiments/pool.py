"""Many runs at once: local processes, or a Dask cluster, through joblib.

Without joblib the standard library's process pool does the same; with one job everything stays in
this process. Every run has one thread, so that its numbers do not depend on how many run beside it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .config import Config, UsageError
from .execute import OnEpoch, execute
from .runs import Line
from .train import Trainer


@dataclass(frozen=True)
class Settings:
    """The settings that all runs of a sweep share; sent to the workers."""

    root: str
    data_dir: str | None = None
    deadline: float | None = None
    checkpoint_seconds: float = 10.0
    tensorboard: bool = False
    graph: bool = True


@dataclass(frozen=True)
class Outcome:
    """A run that ended: with a result, with an error, or (neither) stopped by the deadline."""

    config: Config
    result: Line | None
    error: str | None = None


Work = Callable[[dict[str, Any], Settings], Outcome]


def work(
    config: dict[str, Any],
    settings: Settings,
    read: Callable[[dict[str, Any]], Config] = Config.from_dict,
    make: Callable[..., Trainer] = Trainer,
) -> Outcome:
    """Do one run on one thread, in a worker; an exception becomes the outcome's ``error``."""
    resolved = read(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    on_epoch, close = _tensorboard(resolved, settings)
    try:
        result = execute(
            resolved,
            settings.root,
            data_dir=settings.data_dir,
            deadline=settings.deadline,
            checkpoint_seconds=settings.checkpoint_seconds,
            on_epoch=on_epoch,
            graph=settings.graph,
            make=make,
        )
        return Outcome(resolved, result)
    except Exception:  # one broken run must not stop the others
        return Outcome(resolved, None, traceback.format_exc())
    finally:
        close()
        torch.set_num_threads(threads)


def run_all(
    configs: Sequence[Config],
    settings: Settings,
    jobs: int = 1,
    dask: str | None = None,
    work: Work = work,
) -> Iterator[Outcome]:
    """Do the runs, and yield each outcome as soon as it is ready."""
    if dask is not None:
        yield from _dask(configs, settings, dask, work)
    elif jobs == 1 or len(configs) < 2:
        yield from (work(config.to_dict(), settings) for config in configs)
    else:
        yield from _local(configs, settings, min(jobs, len(configs)), work)


def _local(
    configs: Sequence[Config], settings: Settings, jobs: int, work: Work
) -> Iterator[Outcome]:
    try:
        from joblib import Parallel, delayed
    except ModuleNotFoundError:
        yield from _standard_library(configs, settings, jobs, work)
        return
    parallel = Parallel(
        n_jobs=jobs,
        backend="loky",
        return_as="generator_unordered",
        batch_size=1,
        pre_dispatch="all",
    )
    yield from parallel(delayed(work)(config.to_dict(), settings) for config in configs)


def _standard_library(
    configs: Sequence[Config], settings: Settings, jobs: int, work: Work
) -> Iterator[Outcome]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context) as executor:
        futures = [executor.submit(work, config.to_dict(), settings) for config in configs]
        for future in as_completed(futures):
            yield future.result()


def _dask(
    configs: Sequence[Config], settings: Settings, address: str, work: Work
) -> Iterator[Outcome]:
    """Do the runs on a Dask cluster whose workers share the file system; the runs of a worker that dies go to another."""
    try:
        from joblib import Parallel, delayed, parallel_config

        from distributed import Client
    except ModuleNotFoundError:
        raise UsageError(
            "--dask needs joblib and distributed: pip install 'dask[distributed]'"
        ) from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise UsageError(f"no Dask scheduler at {address}: {error}") from None
    with client, parallel_config(backend="dask", client=client):
        parallel = Parallel(
            n_jobs=-1, return_as="generator_unordered", batch_size=1, pre_dispatch="all"
        )
        yield from parallel(delayed(work)(config.to_dict(), settings) for config in configs)


def _tensorboard(config: Config, settings: Settings) -> tuple[OnEpoch | None, Any]:
    """A callback that logs each epoch to TensorBoard (None unless asked for), and a function that closes the log."""
    if not settings.tensorboard:
        return None, lambda: None
    from torch.utils.tensorboard import SummaryWriter

    name = f"{config.variant}-{config.algorithm}-lr{config.lr:g}-seed{config.seed}"
    writer = SummaryWriter(os.path.join(settings.root, "tensorboard", config.experiment, name))

    def log(line: Line) -> None:
        for key, value in line.items():
            if key != "epoch" and value is not None:
                writer.add_scalar(key.replace("_", "/", 1), value, line["epoch"])

    return log, writer.close
