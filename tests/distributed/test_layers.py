"""Convolutions, recurrent layers, attention and tied weights on several ranks: the run of one rank with all samples."""

from typing import Any

import pytest
import torch
from problems import optimizer, part, same, train
from ranks import run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

WAYS = [
    ("exact", {}),
    ("outer-product", {"sharing": "exact"}),
    ("exact", {"sharing": "reduce"}),
]


class Words(nn.Module):
    """One of each, on the words of a small language; the last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.lstm = nn.LSTM(4, 4, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.down = nn.LayerNorm(8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.conv(self.embed(tokens).transpose(1, 2)).relu_().transpose(1, 2)
        z = self.lstm(z)[0]
        z = self.norm(z + self.attention(z, z, z, need_weights=False)[0])
        return self.head(self.down(z.mean(1)).tanh_())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(5, (8, 6), generator=generator),
            torch.randint(5, (8,), generator=generator),
        )
        for _ in range(2)
    ]


def train_on(
    network: nn.Module, data: list[Any], name: str, options: dict[str, Any], **more: Any
) -> None:
    rule, criterion = optimizer(network, name, eps=1e-4, **options, **more)
    train(network, rule, data, criterion)
    rule.close()


def numbers(network: nn.Module) -> Tensor:
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in network.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def on_ranks(rank: int, size: int, sharded: bool) -> list[Tensor]:
    data = [part(b, rank, size) for b in batches()]
    found = []
    for name, options in WAYS:
        network: nn.Module = Words().double()
        if sharded:
            fully_shard(network)
        else:
            network = nn.parallel.DistributedDataParallel(network)
        train_on(network, data, name, options)
        found.append(numbers(network))
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_are_one(sharded: bool) -> None:
    alone = []
    for name, options in WAYS:
        network = Words().double()
        train_on(network, batches(), name, options, process_group=None)
        alone.append(numbers(network))
    for result in run(on_ranks, 2, sharded):
        for got, expected in zip(result, alone, strict=True):
            same(got, expected)
