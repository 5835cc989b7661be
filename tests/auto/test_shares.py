"""The quadratic model is measured on a part of the samples, where a part of them gives that part of the outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import quasidiag as qd
from nets import batch, mlp

F64 = torch.float64


class Centred(nn.Module):
    """Samples that see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = mlp(4, 6), mlp(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return self.out((h - h.mean(0)).tanh())


class TimeFirst(nn.Module):
    """Takes ``[samples, times, 4]``, and gives ``[times, samples, 3]``, flat or not."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.net, self.flat = mlp(4, 6, 3), flat

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x).transpose(0, 1)
        return y.reshape(-1, 3) if self.flat else y.contiguous()


class Attending(nn.Module):
    """Takes ``[times, samples, 4]``, as attention does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2).double(), mlp(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


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


DEPENDENT: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "centred": (Centred, (512, 4), (512,)),
    "times first": (lambda: TimeFirst(False), (32, 32, 4), (32, 32)),
    "times first, unequal": (lambda: TimeFirst(False), (32, 24, 4), (24, 32)),
    "times first, flat": (lambda: TimeFirst(True), (32, 24, 4), (768,)),
    "attention": (Attending, (32, 24, 4), (32, 24)),
}


@pytest.mark.parametrize("name", list(DEPENDENT))
def test_where_a_part_of_the_samples_gives_something_else_all_are_taken(name: str) -> None:
    """The form is that of the whole minibatch, with its ignored targets."""
    make, shape, targets = DEPENDENT[name]
    generator = torch.Generator().manual_seed(0)
    model = make()
    x = torch.randn(shape, generator=generator, dtype=F64)
    t = torch.randint(3, targets, generator=generator)
    t[len(t) // 2 :] = -100
    quadratic, replay, kept = entry(model, t, x)
    form = quadratic._form(kept, directions(model))
    quadratic.share = 1.0
    torch.testing.assert_close(form, quadratic._form(kept, directions(model)))
    assert not replay.divisible and replay.mode != "differences"
    assert all(module.training for module in model.modules())


def test_a_part_of_the_samples_of_a_batch_norm() -> None:
    """In training mode samples see each other in it, and a part of them still stands for all."""
    model = nn.Sequential(mlp(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), mlp(6, 3)).double()
    x, t = batch("categorical", 512, 4, 3)
    _, replay, kept = entry(model, t, x)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    output, _, _ = replay.tangents(kept, directions(model), 0.25)
    assert replay.divisible and len(output) == 128
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(module.training for module in model.modules())


class Packed(nn.Module):
    """Sequences of several lengths; the longest decides how long the output is."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True).double(), mlp(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def test_a_part_without_the_longest_sequence() -> None:
    """Does not fit, after others that did."""
    model, loss = Packed(), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    x, t = torch.randn(32, 20, 4, dtype=F64), torch.randint(3, (32, 20))
    for longest in (0, 0, 31, 0):
        lengths = torch.full((32,), 12)
        lengths[longest] = 20
        target = torch.where(torch.arange(20) < lengths.unsqueeze(1), t, -100)
        optimizer.zero_grad()
        loss(model(x, lengths), target).backward()
        optimizer.step()
        assert optimizer._model is not None
        assert optimizer._model.replay.divisible == (longest == 0 and optimizer.steps < 3)


class Wide(nn.Module):
    """Many terms from each sample, after a batch norm, which refuses a single one."""

    def __init__(self) -> None:
        super().__init__()
        layers = mlp(4, 6), nn.BatchNorm1d(6).double(), nn.Tanh(), mlp(6, 600)
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).view(-1, 200, 3)


def test_a_short_minibatch_at_the_end_of_an_epoch() -> None:
    model, loss = Wide(), qd.Categorical()
    optimizer = qd.Riemannian(model, loss)
    for samples in (8, 8, 3, 8):
        x, _ = batch("categorical", samples, 4, 3)
        optimizer.zero_grad()
        loss(model(x), torch.randint(3, (samples, 200))).backward()
        optimizer.step()
    assert optimizer._model is not None and optimizer._model.replay.mode == "fast"


@pytest.mark.parametrize("ends", ["first", "last", "between"])
def test_targets_that_count_may_lie_anywhere(ends: str) -> None:
    """Unlabelled samples beside labelled ones, in any order: the curvature is about that of the whole minibatch."""
    model = mlp(4, 6, 3)
    x, t = batch("categorical", 2048, 4, 3)
    labelled = {"first": slice(0, 512), "last": slice(1536, None), "between": slice(1, None, 4)}
    t = torch.full_like(t, -100).index_put((torch.arange(2048)[labelled[ends]],), t[:512])
    quadratic, _, kept = entry(model, t, x)
    form = quadratic._form(kept, directions(model))
    quadratic.share = 1.0
    whole = quadratic._form(kept, directions(model))
    torch.testing.assert_close(form.diagonal(), whole.diagonal(), rtol=0.3, atol=0.0)
