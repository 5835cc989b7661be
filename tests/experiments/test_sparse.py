"""The sparse layer does what the masked dense layer does, on its connections alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import quasidiag as qd
from quasidiag.experiments.sparse import SparseLinear


@pytest.fixture(autouse=True)
def _float64():
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(old)


def twins(sizes=(12, 9, 5), fan_in=4):
    """A sparse network and the dense one with the same matrices."""
    sparse, dense = nn.Sequential(), nn.Sequential()
    for i, (n, m) in enumerate(pairwise(sizes)):
        layer = SparseLinear(n, m, fan_in, seed=i)
        nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(i))
        full = nn.Linear(n, m)
        with torch.no_grad():
            full.weight.copy_(layer.dense_weight())
            full.bias.copy_(layer.bias)
        sparse.append(layer).append(nn.Sigmoid())
        dense.append(full).append(nn.Sigmoid())
    return sparse[:-1], dense[:-1]


@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12), (1, 12), (12,)])
def test_forward_is_the_masked_dense_layer(shape):
    layer = SparseLinear(12, 9, 4)
    a = torch.randn(shape)
    expected = a @ layer.dense_weight().T + layer.bias
    torch.testing.assert_close(layer(a), expected)


def test_gradients_are_the_masked_dense_ones():
    sparse, dense = twins()
    x = torch.randn(6, 12, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    v = torch.randn(6, 5)
    sparse(x).backward(v)
    dense(y).backward(v)
    torch.testing.assert_close(x.grad, y.grad)
    for s, d in zip(sparse[::2], dense[::2]):
        torch.testing.assert_close(s.weight.grad, d.weight.grad.gather(1, s.index))
        torch.testing.assert_close(s.bias.grad, d.bias.grad)


@pytest.mark.parametrize("preset", [qd.DOP, qd.QDOP, qd.DNat, qd.QDNat, qd.QDMCNat])
def test_moments_are_brute_force_ones(preset):
    """Per-sample gradients of the dense twin, squared and averaged, restricted to the connections."""
    sparse, dense = twins()
    criterion = qd.Categorical()
    optimizer = preset(sparse, criterion, lr=0.0)
    x, t = torch.randn(8, 12), torch.randint(5, (8,))
    criterion(sparse(x), t).backward()
    optimizer.step()
    drawn = criterion.sample(dense(x), torch.Generator().manual_seed(0))
    targets = drawn if preset is qd.QDMCNat else t
    expected = {id(layer): [0.0, 0.0, 0.0] for layer in dense[::2]}
    for n in range(8):
        output = dense(x[n : n + 1])
        p = output.softmax(-1).detach()[0]
        exact = preset in (qd.DNat, qd.QDNat)
        pairs = list(zip(p, range(5))) if exact else [(1.0, int(targets[n]))]
        for weight, k in pairs:
            dense.zero_grad()
            criterion(output, torch.tensor([k])).backward(retain_graph=True)
            for layer in dense[::2]:
                g, b = layer.weight.grad, layer.bias.grad[:, None]
                for slot, value in enumerate((b.square(), b * g, g.square())):
                    expected[id(layer)][slot] = expected[id(layer)][slot] + weight * value / 8
    for s, d in zip(sparse[::2], dense[::2]):
        moments, (m00, m0i, mii) = optimizer.moments(s), expected[id(d)]
        torch.testing.assert_close(moments.m00, m00[:, 0], rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(moments.mii, mii.gather(1, s.index), rtol=1e-10, atol=1e-14)
        if preset not in (qd.DOP, qd.DNat):
            torch.testing.assert_close(moments.m0i, m0i.gather(1, s.index), rtol=1e-10, atol=1e-14)


def test_a_step_is_invariant_to_an_affine_change_of_the_inputs():
    """The quasi-diagonal reduction on connections keeps what it promises for dense layers."""
    outputs = []
    for scale, offset in ((1.0, 0.0), (-3.0, 0.7)):
        sparse, _ = twins()
        with torch.no_grad():
            first = sparse[0]
            first.bias.sub_((first.weight * offset / scale).sum(1))
            first.weight.div_(scale)
        criterion = qd.Categorical()
        optimizer = qd.QDOP(sparse, criterion, lr=0.05, eps=0.0, floor=0.0)
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(64, 12, generator=generator)
        t = torch.randint(5, (64,), generator=generator)
        for _ in range(20):
            optimizer.zero_grad()
            criterion(sparse(x * scale + offset), t).backward()
            optimizer.step()
        outputs.append(sparse(x * scale + offset).detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-7, atol=1e-9)


def test_nothing_of_the_dense_size_is_kept():
    """A layer whose dense matrix would take 400 GB trains within the memory of its connections."""
    torch.set_default_dtype(torch.float32)
    layer = SparseLinear(1_000_000, 100, 10)
    optimizer = qd.QDOP(nn.Sequential(layer), lr=0.1)
    layer_input = torch.rand(2, 1_000_000)
    optimizer.zero_grad()
    optimizer.model(layer_input).square().sum(1).mean().backward()
    optimizer.step()
    kept = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert sum(v.numel() for v in kept) <= 2 * 1000 + 100
    assert layer.weight.isfinite().all()


def test_every_unit_has_that_many_different_inputs():
    layer = SparseLinear(30, 50, 10, seed=3)
    assert all(len(set(row.tolist())) == 10 for row in layer.index)
    with pytest.raises(ValueError, match="fan_in"):
        SparseLinear(5, 3, 6)
