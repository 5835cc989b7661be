"""Langevin noise is the same on every rank: several go the way of one with all samples."""

import torch
from problems import batches, model, numbers, part, same, train
from ranks import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import quasidiag as qd


def sampled(network: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    criterion = qd.Categorical()
    optimizer = qd.Langevin(network, criterion, lr=1e-2, data_size=50, metric="exact")
    train(network, optimizer, parts, criterion)
    return numbers(network)


def of_rank(rank: int, size: int) -> dict[str, Tensor]:
    return {"all": sampled(DDP(model()), [part(b, rank, size) for b in batches()])}


def test_ranks_equal_one_rank_with_all_samples() -> None:
    first, second = run(of_rank, 2)
    assert torch.equal(first["all"], second["all"])
    same(first["all"], sampled(model(), batches()))
