"""From the moments to the step: every unit's block by the reference, entry by entry, float64."""

from __future__ import annotations

import pytest
import torch
from oracle import CLOSE, unit_of
from test_adapters import CASES, make
from torch import nn

import quasidiag as qd
from quasidiag import reference

WITH_BIAS = [
    case for case, (layer, *_) in CASES.items() if getattr(layer(), "bias", None) is not None
]


@pytest.mark.parametrize("sharing", ["expand", "exact"])
@pytest.mark.parametrize("case", WITH_BIAS)
def test_quasi_diagonal_step_of_every_unit(case: str, sharing: str) -> None:
    model, x, t = make(case)
    layer, loss, eps = model.layer, qd.Categorical(), 1e-3
    optimizer = qd.QDNat(model, loss, lr=1.0, eps=eps, sharing=sharing)
    before = [p.detach().clone() for p in (layer.bias, layer.weight)]
    loss(model(x), t).backward()
    v0, vi = (p.grad.clone() for p in (layer.bias, layer.weight))
    optimizer.step()
    m00, m0i, mii = optimizer.moments(layer)
    units = unit_of(layer, layer.weight)
    w0, wi = before[0] - layer.bias, before[1] - layer.weight
    for unit in range(layer.bias.numel()):
        mine = units == unit
        w = reference.qd_solve(
            [m00.flatten()[unit].item(), *mii[mine].tolist()],
            m0i[mine].tolist(),
            [v0.flatten()[unit].item(), *vi[mine].tolist()],
            eps=eps,
        )
        got = torch.cat([w0.flatten()[unit : unit + 1], wi[mine]])
        torch.testing.assert_close(got, torch.tensor(w), **CLOSE)


@pytest.mark.parametrize("sharing", ["expand", "exact", "reduce"])
@pytest.mark.parametrize(
    "case", ["Linear on a sequence", "Conv2d in groups", "ConvTranspose2d in groups", "LayerNorm"]
)
def test_unitwise_step_undoes_the_full_block(case: str, sharing: str) -> None:
    """Of a sample's own metric: the block times the step is the gradient again, where nothing is regularised."""
    model, x, t = make(case)
    layer, loss, eps = model.layer, qd.Categorical(), 1e-4
    optimizer = qd.Riemannian(
        model, loss, lr=1.0, metric="exact", reduction="unitwise", sharing=sharing, eps=eps, floor=0
    )
    before = [p.detach().clone() for p in (layer.bias, layer.weight)]
    loss(model(x), t).backward()
    v0, vi = (p.grad.clone() for p in (layer.bias, layer.weight))
    optimizer.step()
    if "block" not in optimizer.state[layer.weight]:
        assert isinstance(layer, nn.LayerNorm)  # a unit with one weight: nothing more to know
        return
    adapter = qd.layers.adapter_of(layer)
    assert adapter is not None
    block = optimizer.state[layer.weight]["block"] + eps * torch.eye(
        adapter.rows(layer, vi).shape[1] + 1
    )
    w, v = (
        torch.cat([bias.unsqueeze(1), adapter.rows(layer, weight)], 1)
        for bias, weight in (
            (before[0] - layer.bias, before[1] - layer.weight),
            (v0, vi),
        )
    )
    torch.testing.assert_close(
        (block @ w.detach().unsqueeze(-1)).squeeze(-1), v, rtol=1e-8, atol=1e-10
    )


def test_affine_change_of_the_inputs_changes_nothing() -> None:
    """Quasi-diagonal training of a convolution sees the same functions when every channel is rescaled and shifted."""
    torch.manual_seed(0)
    scale, shift = torch.tensor([3.0, 0.2]), torch.tensor([1.5, -2.0])
    plain = nn.Conv1d(2, 3, 2)
    changed = nn.Conv1d(2, 3, 2)
    with torch.no_grad():
        changed.weight.copy_(plain.weight / scale[:, None])
        changed.bias.copy_(plain.bias - (changed.weight * shift[:, None]).sum((1, 2)))
    optimizers = [qd.QDOP(m, lr=0.05, eps=0.0) for m in (plain, changed)]
    for _ in range(20):
        x, t = torch.randn(8, 2, 6), torch.randn(8, 3, 5)
        seen = (x, x * scale[:, None] + shift[:, None])
        for model, optimizer, z in zip((plain, changed), optimizers, seen, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(z), t).backward()
            optimizer.step()
    torch.testing.assert_close(plain(seen[0]), changed(seen[1]), rtol=1e-8, atol=1e-8)
