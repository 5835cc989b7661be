"""The same moments on a GPU, whose kernels are others: cuDNN's recurrences, fused cells, fused attention."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import METRICS
from torch import Tensor, nn

import quasidiag as qd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

N, L, D = 6, 5, 8


class Everything(nn.Module):
    """One of each kind of layer, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(7, D), nn.Conv1d(D, D, 3, padding=1, groups=2)
        self.batch, self.up = nn.BatchNorm1d(D), nn.ConvTranspose1d(D, D, 2)
        self.lstm = nn.LSTM(D, D // 2, batch_first=True, num_layers=2, bidirectional=True)
        self.gru, self.cell = nn.GRU(D, D, batch_first=True), nn.LSTMCell(D, D)
        self.encoder = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(D, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.conv(self.embed(tokens).transpose(1, 2)).relu_()
        z = self.up(self.batch(z)).transpose(1, 2)
        z = self.gru(self.lstm(z)[0])[0]
        z = self.encoder(z)
        h, c = self.cell(z[:, 0])
        return self.head(self.cell(z[:, 1], (h, c))[0])


@pytest.mark.parametrize("sharing", ["expand", "exact", "reduce"])
@pytest.mark.parametrize("metric", [m for m in METRICS if m != "monte-carlo"])
def test_moments_on_a_gpu_are_those_on_the_cpu(metric: str, sharing: str) -> None:
    here = Everything()
    there = copy.deepcopy(here).cuda()
    x, t = torch.randint(7, (N, L)), torch.randint(3, (N,))
    found = []
    for model, inputs, targets in ((here, x, t), (there, x.cuda(), t.cuda())):
        loss = qd.Categorical()
        if metric == "exact":  # else samples depend on each other, and signs are drawn for them
            model.batch.eval()
        with qd.Riemannian(model, loss, lr=0.0, metric=metric, sharing=sharing) as optimizer:
            loss(model(inputs), targets).backward()
            optimizer.step()
            found.append({k: optimizer.moments(p) for k, p in model.named_parameters()})
    for name, one in found[0].items():
        for m, other in zip(one, found[1][name], strict=True):
            if m is not None:
                torch.testing.assert_close(other.cpu(), m, rtol=1e-7, atol=1e-12, msg=name)


def test_dropout_of_attention_is_repeated() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, 2, 16, batch_first=True, dropout=0.3, device="cuda"), 2
    )
    optimizer = qd.QDOP(model, qd.Gaussian().cuda(), lr=0.0)
    x = torch.randn(N, L, D, device="cuda")
    optimizer.criterion(model(x), x).backward()  # would raise if a mask could not be had again
    optimizer.step()


def test_dropout_of_cudnn_s_recurrences_is_an_error() -> None:
    model = nn.LSTM(D, D, num_layers=2, dropout=0.5, device="cuda", dtype=torch.float32)
    before = [p.clone() for p in model.parameters()]
    x = torch.randn(N, L, D, device="cuda", dtype=torch.float32)
    optimizer = qd.QDOP(model, qd.Gaussian().cuda(), lr=0.1)
    y = model(x)[0]
    loss = optimizer.criterion(y, torch.zeros_like(y))
    with pytest.raises(RuntimeError, match="dropout inside LSTM could not be repeated"):
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
