"""Layers under autocast: activities and derivatives arrive in half precision, the metric does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd


class Everything(nn.Module):
    """One of each kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(7, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.batch, self.group = nn.BatchNorm1d(8), nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose1d(8, 8, 2)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.both, self.head = nn.Bilinear(8, 8, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.embed(tokens).transpose(1, 2)
        z = self.up(self.group(self.batch(self.conv(z)).relu_())).transpose(1, 2)
        z = self.encoder(self.lstm(z)[0])
        return self.head(self.both(z[:, 0].float(), z[:, -1].float()))  # torch has it in float only


@pytest.mark.parametrize("sharing", ["expand", "exact", "reduce"])
@pytest.mark.parametrize("metric", ["outer-product", "monte-carlo", "exact"])
def test_the_metric_keeps_its_precision(metric: str, sharing: str) -> None:
    torch.set_default_dtype(torch.float32)
    model, loss = Everything(), qd.Categorical()
    x, t = torch.randint(7, (6, 5)), torch.randint(3, (6,))

    def moments(half: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with qd.Riemannian(model, loss, lr=0.0, metric=metric, sharing=sharing) as optimizer:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                y = model(x)
            loss(y.float(), t).backward()
            optimizer.step()
            named = model.named_parameters()
            return {k: optimizer.moments(p).mii for k, p in named if p.dim() > 1}  # type: ignore[misc]

    whole, half = moments(False), moments(True)
    assert len(whole) == 11
    for name, m in whole.items():
        assert half[name].dtype == torch.float32, name
        assert half[name].isfinite().all(), name
        if metric != "monte-carlo":  # its draws differ with the last digit
            assert (half[name] - m).norm() < 0.2 * m.norm(), name
