"""The two networks that are not chains of dense layers, and the text for one of them."""

from __future__ import annotations

import string
from functools import lru_cache

import torch
from torch import Tensor, nn

CONTEXT = 64
ALPHABET = string.printable


def convolutional() -> nn.Sequential:
    """Two convolutions and a dense layer for pictures of 28×28 pixels, about 30,000 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )


class Block(nn.Module):
    """Causal self-attention and a two-layer net, each behind a LayerNorm.

    Attention is written out, because the fused one has no forward-mode derivative.
    """

    mask: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        future = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        self.register_buffer("mask", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n, time, width = x.shape
        parts = self.qkv(self.before(x)).view(n, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        seen = scores.masked_fill(self.mask[:time, :time], float("-inf")).softmax(-1) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(n, time, width))
        return x + self.net(self.between(x))


class GPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET))

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


@lru_cache(maxsize=1)
def text() -> Tensor:
    """Code and documentation of Python's standard library, ``[n, CONTEXT + 1]`` character numbers, shuffled once."""
    import argparse
    import collections
    import inspect
    import json
    import textwrap
    import threading

    modules = (argparse, collections, inspect, json, string, textwrap, threading)
    number = {character: k for k, character in enumerate(ALPHABET)}
    found = "".join(inspect.getsource(module) for module in modules)
    codes = torch.tensor([number[c] for c in found if c in number])
    rows = codes.unfold(0, CONTEXT + 1, CONTEXT)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
