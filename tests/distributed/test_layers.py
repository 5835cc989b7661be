"""Layers other than dense ones, and every way of weight sharing, on several ranks."""

from typing import Any

import pytest
import torch
from problems import numbers, same
from ranks import run
from test_fsdp import whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import quasidiag as qd

STEPS, BATCH = 4, 8


class Everything(nn.Module):
    """An embedding, a convolution, a recurrent layer, attention and a parameter that is in no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 4)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.recurrent = nn.GRU(6, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(4))
        self.out = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.embedding(x).transpose(1, 2))).tanh().transpose(1, 2)
        h, _ = self.recurrent(h)
        h, _ = self.attention(h, h, h, need_weights=False)
        return self.out((h * self.scale).mean(1))


class Convolutional(nn.Sequential):
    """An embedding, a convolution and a dense layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Conv1d(4, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
        super().__init__(nn.Embedding(11, 4), Swap(), *layers)
        self.double()


class Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def train(network: nn.Module, rank: int, size: int, **options: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    criterion = qd.Categorical()
    rule = qd.Riemannian(network, criterion, lr=0.02, gamma=0.3, eps=1e-4, **options)
    for _ in range(STEPS):
        x = torch.randint(11, (BATCH, 6), generator=generator).chunk(size)[rank]
        t = torch.randint(3, (BATCH,), generator=generator).chunk(size)[rank]
        rule.zero_grad()
        criterion(network(x), t).backward()
        rule.step()


WAYS = {
    "outer product": dict(),
    "exact": dict(metric="exact"),
    "samples": dict(sharing="exact"),
    "reduced": dict(sharing="reduce"),
    "recurrent": dict(sharing="recurrent"),
}


def on_ranks(rank: int, size: int) -> dict[str, Tensor]:
    found = {}
    for name, options in WAYS.items():
        network = DDP(Everything() if name != "reduced" else Convolutional())
        train(network, rank, size, **options)
        found[name] = numbers(network)
    for name in ("outer product", "exact"):
        sharded = Convolutional()
        for layer in (sharded[0], sharded[2], sharded[-1]):
            fully_shard(layer)
        fully_shard(sharded)
        train(sharded, rank, size, **WAYS[name])
        found[f"sharded {name}"] = whole(sharded)
    return found


@pytest.mark.filterwarnings("ignore:no block structure is known")
def test_ranks_equal_one_rank_with_all_samples() -> None:
    results = run(on_ranks, 2)
    for name, options in WAYS.items():
        network = Everything() if name != "reduced" else Convolutional()
        train(network, 0, 1, process_group=None, **options)
        for result in results:
            same(result[name], numbers(network))
    for name in ("outer product", "exact"):
        lone = Convolutional()
        train(lone, 0, 1, **WAYS[name])
        for result in results:
            same(result[f"sharded {name}"], numbers(lone))
