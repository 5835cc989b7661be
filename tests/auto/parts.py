"""What tests of parts of a minibatch have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import quasidiag as qd
from nets import mlp

F64 = torch.float64


def entry(model: nn.Module, t: Tensor, *x: Any) -> Any:
    torch.manual_seed(1)
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    loss(model(*x), t).backward()
    assert optimizer._model is not None
    replay = optimizer._model.replay
    return optimizer._model, replay, replay.weighted()[0][1]


def directions(model: nn.Module) -> list[dict[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {p: torch.randn(p.shape, generator=generator, dtype=F64) for p in model.parameters()}
        for _ in range(2)
    ]


class Packed(nn.Module):
    """Sequences of several lengths; the longest decides how long the output is."""

    def __init__(self, sort: bool = False) -> None:
        super().__init__()
        self.sort = sort
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True).double(), mlp(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.sort)
        return self.out(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def train(optimizer: qd.Riemannian, x: Tensor, t: Tensor, steps: int) -> float:
    assert optimizer.criterion is not None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = optimizer.criterion(optimizer.model(x), t)
        loss.backward()
        optimizer.step()
    return float(loss.detach())
