"""Bytes that the ranks send each other per step: measured on two ranks, with an estimate of their time on many GPUs.

    python benchmarks/scaling.py

Two processes train over gloo, and every tensor that quasidiag hands to a collective is counted, next to the gradients
that DDP and ``fully_shard`` reduce. What K-FAC and Shampoo would send for the same layers is computed from their shapes.
The times are computed under the assumptions of :data:`CLUSTERS`, not measured.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel

import quasidiag as qd
import quasidiag.distributed


class Cluster(NamedTuple):
    """An assumed cluster: the bytes that a GPU sends per second, and the latency of a message per doubling of ranks."""

    gpus: int
    bytes_per_second: float
    latency: float


CLUSTERS = [Cluster(8, 200e9, 5e-6), Cluster(64, 25e9, 10e-6), Cluster(1024, 25e9, 10e-6)]
#: K-FAC and Shampoo keep no matrix for sides of a weight longer than this (such as the vocabulary).
LONGEST = 4096
VOCABULARY, WIDTH, DEPTH, LENGTH = 8192, 512, 6, 32


def perceptron() -> nn.Module:
    """The paper's classifier, 784-800-800-10."""
    return nn.Sequential(
        nn.Linear(784, 800), nn.Tanh(), nn.Linear(800, 800), nn.Tanh(), nn.Linear(800, 10)
    )


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (-1, 64)).transpose(1, 2).chunk(3, 1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def transformer() -> nn.Module:
    """A language model of 6 layers, 512 wide."""
    blocks = [Block(WIDTH) for _ in range(DEPTH)]
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


def minibatch(name: str) -> tuple[Tensor, Tensor]:
    if name == "perceptron":
        return torch.rand(16, 784), torch.randint(10, (16,))
    return torch.randint(VOCABULARY, (1, LENGTH)), torch.randint(VOCABULARY, (1, LENGTH))


MODELS = {"perceptron": perceptron, "transformer": transformer}


class Meter:
    """Stands in for ``torch.distributed`` and counts the bytes and calls of its collectives."""

    def __init__(self) -> None:
        self.bytes, self.calls = 0, 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(dist, name)
        if not name.startswith(("all_reduce", "reduce_scatter", "all_gather")):
            return function

        def counted(*args: Any, **options: Any) -> Any:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            self.bytes += max(x.numel() * x.element_size() for x in tensors)  # the unsharded one
            self.calls += 1
            return function(*args, **options)

        return counted


def reduce(meter, bucket):  # no annotations: DDP refuses those that are strings
    """Average DDP's gradients as it does by itself, but counted by ``meter``."""
    work = meter.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))


class Measured(NamedTuple):
    """Bytes and calls of one step: DDP's or ``fully_shard``'s (``others``), and those quasidiag adds (``own``)."""

    parameters: int
    others: int
    others_calls: int
    own: int
    own_calls: int
    linear: list[tuple[int, int]]


def measure(rank: int, folder: str, name: str, way: str, reduction: str) -> None:
    """Train three steps as one of two ranks, and save the bytes and calls of the last step in ``folder``."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = MODELS[name]()
    parameters = sum(p.numel() for p in model.parameters())
    linear = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    own, others = Meter(), Meter()
    if way == "ddp":
        model = DistributedDataParallel(model)
        model.register_comm_hook(others, reduce)
    else:
        for module in model:
            if any(True for _ in module.parameters()):
                fully_shard(module)
        fully_shard(model)
        _fsdp_collectives.dist = others
    criterion = qd.Categorical()
    quasidiag.distributed.dist = own
    optimizer = qd.Riemannian(model, criterion, lr=1e-3, reduction=reduction)
    for _ in range(3):
        own.__init__()
        others.__init__()
        optimizer.zero_grad()
        x, t = minibatch(name)
        criterion(model(x), t).backward()
        optimizer.step()
    if rank == 0:
        found = Measured(parameters, others.bytes, others.calls, own.bytes, own.calls, linear)
        torch.save(tuple(found), Path(folder) / "found.pt")
    dist.destroy_process_group()


def on_two_ranks(name: str, way: str, reduction: str = "quasi-diagonal") -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder, name, way, reduction), nprocs=2)
        return Measured(*torch.load(Path(folder) / "found.pt"))


def kfac(linear: list[tuple[int, int]]) -> int:
    """Bytes of K-FAC's two factors per layer: one for its inputs (with the bias), one for its outputs."""
    return 4 * sum(side**2 for m, n in linear for side in (m, n + 1) if side <= LONGEST)


def shampoo(linear: list[tuple[int, int]]) -> int:
    """Bytes of Shampoo's two preconditioners per weight."""
    return 4 * sum(side**2 for m, n in linear for side in (m, n) if side <= LONGEST)


def milliseconds(size: float, cluster: Cluster, rounds: float, calls: float = 1) -> float:
    """Estimated time to send ``size`` bytes; ``rounds`` is 2 for a ring all-reduce, 1 for reduce-scatter or all-gather."""
    wire = rounds * size * (cluster.gpus - 1) / cluster.gpus
    wait = calls * cluster.latency * math.log2(cluster.gpus)
    return 1e3 * (wire / cluster.bytes_per_second + wait)


def table(name: str) -> None:
    ddp, diagonal = on_two_ranks(name, "ddp"), on_two_ranks(name, "ddp", "diagonal")
    sharded = on_two_ranks(name, "fsdp")
    factors, roots, updates = kfac(ddp.linear), shampoo(ddp.linear), 4 * ddp.parameters
    print(f"\n{MODELS[name].__doc__} {ddp.parameters:,} parameters, float32.\n")
    rows: list[tuple[str, float, int, float]] = [
        ("gradients (DDP)", ddp.others, 2, ddp.others_calls),
        ("quasidiag, quasi-diagonal", ddp.own, 2, ddp.own_calls),
        ("quasidiag, quasi-diagonal, `metric_every=10`", ddp.own / 10, 2, (ddp.own_calls + 9) / 10),
        ("quasidiag, diagonal", diagonal.own, 2, diagonal.own_calls),
        ("Shampoo, updates gathered", updates, 1, 1),
        ("Shampoo, preconditioners sent when renewed", roots, 1, 1),
        ("K-FAC, factors", factors, 2, 1),
        ("K-FAC, inverses sent when renewed", factors, 1, 1),
        ("weights and gradients (`fully_shard`)", sharded.others, 1, sharded.others_calls),
        ("quasidiag, quasi-diagonal, `fully_shard`", sharded.own, 1, sharded.own_calls),
    ]
    heads = " | ".join(f"{c.gpus:,} GPUs" for c in CLUSTERS)
    print(f"| what | MB handed over | × gradients | {heads} |")
    print("|---|---" + "|---" * (1 + len(CLUSTERS)) + "|")
    for what, size, rounds, calls in rows:
        times = " | ".join(f"{milliseconds(size, c, rounds, calls):.2f} ms" for c in CLUSTERS)
        print(f"| {what} | {size / 1e6:.2f} | {size / updates:.2f} | {times} |")


if __name__ == "__main__":
    for model_name in MODELS:
        table(model_name)
