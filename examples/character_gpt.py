"""A character-level GPT on text that ships with Python: the source of its standard library."""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import string
import textwrap
import threading

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quasidiag as qd

CONTEXT = 64


def text() -> str:
    """The source of a few modules: a few hundred thousand ASCII characters of code and documentation."""
    modules = (argparse, collections, inspect, json, string, textwrap, threading)
    found = "".join(inspect.getsource(module) for module in modules)
    return "".join(character for character in found if character in string.printable)


class Block(nn.Module):
    """Causal self-attention and a two-layer net, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.net(self.between(x))


class GPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, characters: int, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


@torch.no_grad()
def write(model: GPT, start: Tensor, count: int) -> Tensor:
    """Continue ``start`` by ``count`` characters."""
    model.eval()
    for _ in range(count):
        p = model(start[-CONTEXT:].unsqueeze(0))[0, -1].softmax(-1)
        start = torch.cat([start, torch.multinomial(p, 1)])
    model.train()
    return start


def main(steps: int = 400, batch: int = 32) -> list[float]:
    """Train, and print a sample; return the mean loss (nats per character) of every tenth of the steps."""
    torch.manual_seed(0)
    corpus = text()
    alphabet = sorted(set(corpus))
    number = {character: i for i, character in enumerate(alphabet)}
    data = torch.tensor([number[character] for character in corpus])

    model, criterion = GPT(len(alphabet)), qd.Categorical()
    optimizer = qd.QDOP(model, criterion, lr=3e-3, eps=1e-5, metric_start=100)

    losses: list[float] = []
    window: list[float] = []
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (batch,)).tolist()
        chunk = torch.stack([data[i : i + CONTEXT + 1] for i in starts])
        optimizer.zero_grad()
        loss = criterion(model(chunk[:, :-1]), chunk[:, 1:])
        loss.backward()
        optimizer.step()
        window.append(loss.item())
        if len(window) == max(1, steps // 10):
            losses.append(sum(window) / len(window))
            window.clear()
            print(f"{len(losses) * 10:3}%: {losses[-1]:.3f} nats a character")

    sample = write(model, torch.tensor([number[character] for character in "    def "]), 200)
    print("".join(alphabet[i] for i in sample.tolist()))
    return losses


if __name__ == "__main__":
    main()
