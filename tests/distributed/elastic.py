"""Run by torchrun: DDP training that checkpoints every step, and in which one rank may be killed.

torchrun --max-restarts=1 elastic.py FOLDER KILL_AT_STEP
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from problems import batches, model, numbers, optimizer, part, train
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

NEVER = -1


def train_on(rank: int, size: int, folder: Path, kill_at: int = NEVER) -> Tensor:
    """The parameters in the end, from where the last checkpoint left them."""
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    network = DDP(model())
    rule, criterion = optimizer(network, "monte-carlo", metric_every=2)
    checkpoint, start = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        network.load_state_dict(saved["model"])
        rule.load_state_dict(saved["optimizer"])
        start = rule.steps
        (folder / f"resumed_at_{start}").touch()
    for batch in batches()[start:]:
        if first_life and rank == size - 1 and rule.steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        train(network, rule, [part(batch, rank, size)], criterion)
        if rank == 0:
            saved = {"model": network.state_dict(), "optimizer": rule.state_dict()}
            torch.save(saved, folder / "new.pt")
            os.replace(folder / "new.pt", checkpoint)
    return numbers(network)


def main(folder: Path, kill_at: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parameters = train_on(rank, dist.get_world_size(), folder, kill_at)
    torch.save(parameters, folder / f"parameters_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
