"""MultiheadAttention: the re-run against torch's own function, float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import CLOSE, METRICS, assert_close, moments, sample_gradients, step, unit_of, vectors
from torch import Tensor, nn

import quasidiag as qd

N, L, E = 3, 4, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {"batch_first": True},
    "batch second": {},
    "dropout": {"dropout": 0.4},
    "separate": {"kdim": 3, "vdim": 5},
    "without bias": {"bias": False, "batch_first": True},
    "zero attention": {"add_zero_attn": True},
}


class Attend(nn.Module):
    """Self- or cross-attention under a head. Batch first outside."""

    def __init__(self, cross: bool, need_weights: bool = True, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, **options)
        self.key = torch.randn(N, 3, options.get("kdim", E))
        self.value = torch.randn(N, 3, options.get("vdim", E))
        self.head = nn.Linear(L * E, 3)
        self.cross, self.need_weights = cross, need_weights
        self.options: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        inputs = (x, self.key, self.value) if self.cross else (x, x, x)
        if not self.attention.batch_first:
            swapped = {id(i): i.transpose(0, 1) for i in inputs}
            inputs = tuple(swapped[id(i)] for i in inputs)  # type: ignore[assignment]
        out, _ = self.attention(*inputs, need_weights=self.need_weights, **self.options)
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return self.head(out.flatten(1))


def blocks(attention: nn.MultiheadAttention) -> list[list[Tensor]]:
    """Weight and bias of every block; with separate projections the packed bias stands alone."""
    out: list[Tensor] = [attention.out_proj.weight]
    if attention.out_proj.bias is not None:
        out.append(attention.out_proj.bias)
    if attention.in_proj_weight is None:
        a = attention
        return [out, [a.q_proj_weight], [a.k_proj_weight], [a.v_proj_weight], [a.in_proj_bias]]
    inner = [attention.in_proj_weight]
    return [out, inner if attention.in_proj_bias is None else [*inner, attention.in_proj_bias]]


def assert_sample_moments(optimizer: qd.Riemannian, model: Attend, y: Tensor, vs: Any) -> None:
    for parameters in blocks(model.attention):
        found = sample_gradients(y, vs, parameters)
        got = optimizer.moments(parameters[0])
        if parameters[0].dim() == 1:
            expected = sum(g[0] ** 2 for g in found) / N
            torch.testing.assert_close(got.m00, expected, **CLOSE)
            continue
        units = unit_of(nn.Linear(1, 1), parameters[0])
        assert_close(got, moments(found, N, units, len(parameters) > 1))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_sharing_is_torch_s_own_gradient_of_each_sample(
    variant: str, metric: str, need_weights: bool
) -> None:
    for cross in (True,) if variant == "separate" else (True, False):
        model = Attend(cross, need_weights, **VARIANTS[variant])
        x, t, loss = torch.randn(N, L, E), torch.randint(3, (N,)), qd.Categorical()
        torch.manual_seed(5)  # the dropout mask
        optimizer, drawn = step(model, x, t, loss, metric, sharing="exact", samples=2)
        torch.manual_seed(5)
        y = model(x)
        assert_sample_moments(optimizer, model, y, vectors(metric, loss, y, t, drawn))


@pytest.mark.parametrize("need_weights", [True, False])
def test_masks(need_weights: bool) -> None:
    model = Attend(False, need_weights, batch_first=True)
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1, 2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    for options in (
        {"key_padding_mask": padding},
        {"attn_mask": causal, "is_causal": True},
        {"attn_mask": causal.isinf(), "key_padding_mask": padding},
        {"average_attn_weights": False},
    ):
        model.options = options
        x, t, loss = torch.randn(N, L, E), torch.randint(3, (N,)), qd.Categorical()
        optimizer, _ = step(model, x, t, loss, "exact", sharing="exact")
        y = model(x)
        assert_sample_moments(optimizer, model, y, vectors("exact", loss, y, t, []))
        model.zero_grad()


def test_extra_key_and_value_follow_the_diagonal_rule() -> None:
    model = Attend(False, add_bias_kv=True, batch_first=True)
    x, t, loss = torch.randn(N, L, E), torch.randint(3, (N,)), qd.Categorical()
    with pytest.warns(UserWarning, match=r"attention.bias_k \(MultiheadAttention\)"):
        optimizer, _ = step(model, x, t, loss, "exact", sharing="exact")
    y = model(x)
    assert_sample_moments(optimizer, model, y, vectors("exact", loss, y, t, []))
    assert "square" in optimizer.state[model.attention.bias_k]


@pytest.mark.parametrize("metric", METRICS)
def test_every_position_is_one_more_occurrence(metric: str) -> None:
    """Brute force: attention written out, with weights of its own for every sample and position."""
    model = Attend(False, batch_first=True)
    attention = model.attention
    x, t, loss = torch.randn(N, L, E), torch.randint(3, (N,)), qd.Categorical()
    optimizer, drawn = step(model, x, t, loss, metric, samples=2)

    def copies(p: Tensor) -> Tensor:
        return p.detach().expand(N, L, *p.shape).clone().requires_grad_()

    own = [copies(p) for p in (attention.in_proj_weight, attention.in_proj_bias)]
    out = [copies(p) for p in (attention.out_proj.weight, attention.out_proj.bias)]

    def dense(a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.einsum("nsi,nsoi->nso", a, weight) + bias

    q, k, v = (z.view(N, L, 2, E // 2).transpose(1, 2) for z in dense(x, *own).chunk(3, -1))
    heads = (q @ k.mT / (E // 2) ** 0.5).softmax(-1) @ v
    y = model.head(dense(heads.transpose(1, 2).flatten(2), *out).flatten(1))
    torch.testing.assert_close(y, model(x), **CLOSE)
    for weight, pair in ((attention.in_proj_weight, own), (attention.out_proj.weight, out)):
        found = [
            [g.flatten(0, 1)[i] for g in torch.autograd.grad(y, pair, u, retain_graph=True)]
            for u in vectors(metric, loss, y, t, drawn)
            for i in range(N * L)
        ]
        expected = moments(found, N, unit_of(nn.Linear(1, 1), weight))
        assert_close(optimizer.moments(weight), expected)


def test_the_out_projection_is_the_layer_s_own() -> None:
    model = Attend(False, batch_first=True)
    optimizer, _ = step(
        model, torch.randn(N, L, E), torch.randint(3, (N,)), qd.Categorical(), "exact"
    )
    by_layer = optimizer.moments(model.attention.out_proj)
    assert_close(by_layer, optimizer.moments(model.attention.out_proj.weight))
    with pytest.raises(KeyError, match="MultiheadAttention"):
        optimizer.moments(model.attention)


@pytest.mark.parametrize("metric", ["outer-product", "monte-carlo"])
def test_a_transformer_encoder_learns(metric: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(3, 8), encoder, nn.Flatten(), nn.Linear(L * 8, 2))
    x = torch.randn(64, L, 3)
    t = (x[:, 0, 0] * x[:, 1, 0] > 0).long()
    loss = qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=3e-3, metric=metric, gamma=0.1)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(loss(model(x), t))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]
