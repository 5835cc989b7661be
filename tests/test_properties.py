"""Promises over whatever shapes, batch sizes, dtypes and biases come along."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import quasidiag as qd
from nets import OUTPUTS, batch, criterion, linear_layers, mlp
from quasidiag import reference

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
seeds = st.integers(0, 2**16)
sizes = st.lists(st.integers(1, 7), min_size=2, max_size=4)
metrics = st.sampled_from(["outer-product", "monte-carlo", "exact", "backpropagated"])
reductions = st.sampled_from(["quasi-diagonal", "diagonal", "unitwise"])


@few
@given(
    n=st.integers(1, 12), samples=st.integers(1, 9), seed=seeds, eps=st.sampled_from([1e-6, 0.1])
)
def test_solve_inverts_the_completion(n: int, samples: int, seed: int, eps: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(samples, 1 + n, generator=generator, dtype=torch.float64)
    g[:, 1:] += 0.5 * g[:, :1]
    full, v = g.T @ g / samples, g.sum(0)
    w = qd.qd_solve(full.diagonal(), full[0, 1:], v, eps=eps, floor=0.0)
    dense = reference.completion(full.diagonal() + eps, full[0, 1:])
    assert torch.linalg.eigvalsh(dense)[0] > 0
    torch.testing.assert_close(dense @ w, v, rtol=1e-7, atol=1e-7)


@few
@given(
    n=st.integers(1, 6),
    count=st.integers(1, 5),
    seed=seeds,
    alpha=st.floats(0, 2, allow_subnormal=False),
)
def test_rank_one_updates_add_up_to_the_moments(
    n: int, count: int, seed: int, alpha: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(count, 1 + n, generator=generator, dtype=torch.float64)
    diagonal, row = torch.zeros(1 + n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for v in vectors:
        diagonal, row = qd.qd_rank_one_update(diagonal, row, v, alpha)
    full = alpha * vectors.T @ vectors
    torch.testing.assert_close(diagonal, full.diagonal(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(row, full[0, 1:], rtol=1e-10, atol=1e-12)


@few
@given(sizes=sizes, n=st.integers(1, 9), output=st.sampled_from(OUTPUTS), seed=seeds)
def test_outer_product_moments_are_those_of_per_sample_gradients(
    sizes: list[int], n: int, output: str, seed: int
) -> None:
    model, loss = mlp(*sizes, seed=seed), criterion(output)
    x, t = batch(output, n, sizes[0], sizes[-1], seed)
    gradients = reference.per_sample_gradients(model, loss, x, t)
    optimizer = qd.QDOP(model, loss, lr=1e-3)
    loss(model(x), t).backward()
    optimizer.step()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            blocks = reference.unit_blocks(gradients, name)
            want = reference.unit_moments(reference.unit_matrices(blocks))
            got = optimizer.moments(module)
            torch.testing.assert_close(got.m00, want.m00, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(got.m0i, want.m0i, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(got.mii, want.mii, rtol=1e-10, atol=1e-12)


@few
@given(
    sizes=sizes,
    n=st.integers(1, 9),
    output=st.sampled_from(OUTPUTS),
    metric=metrics,
    reduction=reductions,
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=seeds,
)
def test_every_combination_takes_finite_steps_downhill(
    sizes: list[int],
    n: int,
    output: str,
    metric: str,
    reduction: str,
    bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    model, loss = mlp(*sizes, seed=seed, bias=bias).to(dtype), criterion(output)
    x, t = batch(output, n, sizes[0], sizes[-1], seed)
    x, t = x.to(dtype), t.to(dtype) if t.is_floating_point() else t
    optimizer = qd.Riemannian(model, loss, lr=1e-4, metric=metric, reduction=reduction, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        v = [p.grad.clone() for p in model.parameters()]
        optimizer.precondition_()
        w = [p.grad for p in model.parameters()]
        assert all(torch.isfinite(d).all() and d.dtype == dtype for d in w)
        inner = sum(float((a.double() * b.double()).sum()) for a, b in zip(v, w, strict=True))
        assert inner >= 0  # M is positive definite, so vᵀM⁻¹v is not negative
    for layer in linear_layers(model):
        moments = optimizer.moments(layer)
        assert (moments.mii >= 0).all()
        assert moments.mii.shape == layer.weight.shape
        assert (moments.m00 is None) == (not bias)


@few
@given(lead=st.lists(st.integers(1, 3), min_size=1, max_size=3), seed=seeds, bias=st.booleans())
def test_inputs_of_any_leading_shape(lead: list[int], seed: int, bias: bool) -> None:
    models = [mlp(3, 4, 2, seed=seed, bias=bias) for _ in range(2)]
    n = int(torch.tensor(lead).prod())
    x, t = batch("categorical", n, 3, 2, seed)
    for model, inputs, target in (
        (models[0], x, t),
        (models[1], x.view(*lead, 3), t.view(*lead)),
    ):
        loss = criterion("categorical")
        optimizer = qd.QDOP(model, loss, lr=0.01, eps=1e-4)
        loss(model(inputs), target).backward()
        optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
