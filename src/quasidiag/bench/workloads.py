"""The workloads: a network and one batch of data each."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Workload:
    """A classifier and one batch; with ``graph`` the whole step is captured in a CUDA graph."""

    name: str
    model: nn.Module
    x: Tensor
    target: Tensor
    autocast: torch.dtype | None = None
    graph: bool = False

    @property
    def device(self) -> torch.device:
        return self.x.device

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


def gpt(
    batch: int,
    length: int = 1024,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    vocabulary: int = 50304,
    device: str = "cuda",
    **options: object,
) -> Workload:
    """A GPT-2 of 124M parameters (the defaults), whose first and last layer share one matrix."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(vocabulary, length, width, depth, heads)
        tokens = torch.randint(0, vocabulary, (batch, length + 1))
    size = sum(p.numel() for p in model.parameters())
    name = f"GPT {size / 1e6:.0f}M, {batch}×{length} tokens"
    return Workload(name, model, tokens[:, :-1], tokens[:, 1:].contiguous(), **options)  # type: ignore[arg-type]


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
