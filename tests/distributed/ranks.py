"""Real processes over gloo on this machine: every rank runs a function, and its results come back."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "quasidiag"])


def run(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """``function(rank, size, *args)`` on ``size`` ranks that know each other; its results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(target=_rank, args=(function, rank, size, folder, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=900)  # not a bound on speed: only a deadlock takes as long
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        results = [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(size)
            if (Path(folder) / f"{rank}.pt").exists()
        ]
    errors = [result["error"] for result in results if "error" in result]
    assert not errors, "\n".join(errors)
    assert not stuck, f"ranks {stuck} wait for each other"
    assert len(results) == size, f"{size - len(results)} ranks died"
    return [result["value"] for result in results]


def _rank(function: Callable[..., Any], rank: int, size: int, folder: str, args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    try:
        result = {"value": function(rank, size, *args)}
    except Exception:
        result = {"error": f"rank {rank}: {traceback.format_exc()}"}
    torch.save(result, f"{folder}/{rank}.pt")
    if "error" not in result:
        dist.destroy_process_group()
