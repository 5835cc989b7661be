"""A rank is killed, torchrun starts the job again, and it ends where it would have ended."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from elastic import train_on
from ranks import run
from torch import Tensor

RANKS, KILLED_AT = 2, 3


def torchrun(folder: Path, kill_at: int) -> list[Tensor]:
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=localhost",
    ]
    command += [f"--nproc-per-node={RANKS}", "--max-restarts=1", "--monitor-interval=0.1"]
    command += [str(Path(__file__).with_name("elastic.py")), str(folder), str(kill_at)]
    # A store of its own for every life: gloo would read the addresses of the last one's ranks in a shared store.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"parameters_{rank}.pt") for rank in range(RANKS)]


def test_a_killed_rank_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    undisturbed = run(train_on, RANKS, tmp_path / "undisturbed")
    disturbed = torchrun(tmp_path / "disturbed", KILLED_AT)
    resumed = [p.name for p in (tmp_path / "disturbed").glob("resumed_at_*")]
    assert len(resumed) == 1 and int(resumed[0].split("_")[-1]) in (KILLED_AT - 1, KILLED_AT)
    for before, after in zip(undisturbed, disturbed):
        assert torch.equal(before, after)
