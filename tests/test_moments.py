"""The moments of every metric against brute-force per-sample gradients, float64, to 1e-10."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import OUTPUTS, batch, criterion, linear_layers, mlp
from quasidiag import reference

SIZES = (5, 4, 3)
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Recording(nn.Module):
    """Wraps a criterion's draws, to hand the very same ones to the brute force."""

    @staticmethod
    def of(model: qd.OutputModel) -> list[Tensor]:
        drawn: list[Tensor] = []
        plain = model.sample

        def sample(output: Tensor, generator: torch.Generator | None = None) -> Tensor:
            drawn.append(plain(output, generator))
            return drawn[-1]

        model.sample = sample  # type: ignore[method-assign]
        return drawn


def one_step(
    model: nn.Module, loss: qd.OutputModel, x: Tensor, t: Tensor, metric: str, **options: object
) -> qd.Riemannian:
    optimizer = qd.Riemannian(model, loss, lr=1e-3, metric=metric, **options)
    loss(model(x), t).backward()
    optimizer.step()
    return optimizer


def per_sample(
    model: nn.Module, loss: qd.OutputModel, x: Tensor, t: Tensor
) -> dict[str, reference.UnitMoments]:
    gradients = reference.per_sample_gradients(model, loss, x, t)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {
        name: reference.unit_moments(
            reference.unit_matrices(reference.unit_blocks(gradients, name))
        )
        for name in names
    }


def assert_same(optimizer: qd.Riemannian, model: nn.Module, expected: dict) -> None:
    for name, moments in expected.items():
        got = optimizer.moments(model.get_submodule(name))
        for field in ("m00", "m0i", "mii"):
            torch.testing.assert_close(getattr(got, field), getattr(moments, field), **CLOSE)


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "unitwise"])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("n", [1, 7])
def test_outer_product(output: str, n: int, reduction: str) -> None:
    model, loss = mlp(*SIZES), criterion(output)
    x, t = batch(output, n, SIZES[0], SIZES[-1])
    expected = per_sample(model, loss, x, t)
    assert_same(one_step(model, loss, x, t, "outer-product", reduction=reduction), model, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_outer_product_of_any_loss(reduction: str) -> None:
    model, x = mlp(*SIZES), batch("gaussian", 6, *SIZES[::2])[0]
    t = torch.randn(6, 3, dtype=torch.float64)
    each = lambda y, t: torch.nn.functional.smooth_l1_loss(y, t, reduction="none").sum()  # noqa: E731
    expected = per_sample(model, each, x, t)  # type: ignore[arg-type]
    optimizer = qd.QDOP(model, lr=1e-3, loss_reduction=reduction)
    (each(model(x), t) / (len(x) if reduction == "mean" else 1)).backward()
    optimizer.step()
    assert_same(optimizer, model, expected)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("samples", [1, 3])
def test_monte_carlo_at_the_same_draws(output: str, samples: int) -> None:
    model, loss = mlp(*SIZES), criterion(output)
    x, t = batch(output, 7, SIZES[0], SIZES[-1])
    frozen, drawn = mlp(*SIZES), Recording.of(loss)
    optimizer = one_step(model, loss, x, t, "monte-carlo", samples=samples)
    assert len(drawn) == samples
    each = [per_sample(frozen, criterion(output), x, draw) for draw in drawn]
    expected = {
        name: reference.UnitMoments(
            *(torch.stack(m).mean(0) for m in zip(*[one[name] for one in each], strict=True))
        )
        for name in each[0]
    }
    assert_same(optimizer, model, expected)


@pytest.mark.parametrize("output", OUTPUTS)
def test_exact_sums_over_the_output_s_vectors(output: str) -> None:
    model, loss = mlp(*SIZES), criterion(output)
    x, t = batch(output, 7, SIZES[0], SIZES[-1])
    totals: dict[str, Tensor] = {}
    for vector in loss.vectors(model(x).detach()):
        gradients = reference.vector_gradients(model, x, vector)
        for name in ("0", "2"):
            block = reference.unit_matrices(reference.unit_blocks(gradients, name))
            totals[name] = totals.get(name, 0) + block
    expected = {name: reference.unit_moments(total) for name, total in totals.items()}
    assert_same(one_step(model, loss, x, t, "exact"), model, expected)


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "relu"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_backpropagated_follows_the_recursion(output: str, activation: str) -> None:
    sizes = (5, 4, 6, 3)
    model, loss = mlp(*sizes, activation=activation), criterion(output)
    x, t = batch(output, 7, sizes[0], sizes[-1])
    chain = reference.Chain.of(linear_layers(model), activation=activation, output=output, std=0.75)
    metric = chain.batch_metric("backpropagated", x.tolist(), [])
    optimizer = one_step(model, loss, x, t, "backpropagated")
    for layer, units in zip(linear_layers(model), metric, strict=True):
        got = optimizer.moments(layer)
        diagonal = torch.tensor([unit[0] for unit in units], dtype=torch.float64)
        row = torch.tensor([unit[1] for unit in units], dtype=torch.float64)
        torch.testing.assert_close(got.m00, diagonal[:, 0], **CLOSE)
        torch.testing.assert_close(got.mii, diagonal[:, 1:], **CLOSE)
        torch.testing.assert_close(got.m0i, row, **CLOSE)


def test_backpropagated_is_exact_where_paths_do_not_meet() -> None:
    """One layer with independent outputs: the recursion has nothing to approximate."""
    x, t = batch("gaussian", 7, 5, 3)
    pair = [mlp(5, 3), mlp(5, 3)]
    both = [
        one_step(model, criterion("gaussian"), x, t, metric)
        for model, metric in zip(pair, ("exact", "backpropagated"), strict=True)
    ]
    one, other = (o.moments(m[0]) for o, m in zip(both, pair, strict=True))
    torch.testing.assert_close(one.mii, other.mii, **CLOSE)
    torch.testing.assert_close(one.m0i, other.m0i, **CLOSE)


@pytest.mark.parametrize("metric", ["outer-product", "exact"])
def test_moving_average(metric: str) -> None:
    model, loss, gamma = mlp(*SIZES), criterion("categorical"), 0.2
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=metric, gamma=gamma)
    expected = None
    for seed in range(4):
        x, t = batch("categorical", 6, *SIZES[::2], seed=seed)
        chain = reference.Chain.of(linear_layers(model))
        new = chain.batch_metric(metric, x.tolist(), t.unsqueeze(1).tolist())
        now = torch.tensor([unit[0] for unit in new[0]], dtype=torch.float64)
        expected = now if expected is None else (1 - gamma) * expected + gamma * now
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    got = optimizer.moments(model[0])
    torch.testing.assert_close(torch.cat([got.m00.unsqueeze(1), got.mii], 1), expected, **CLOSE)


@pytest.mark.parametrize(
    ("start", "rates"), [(3, [1, 1 / 2, 1 / 3, 0.2, 0.2]), ("identity", [0.2] * 5)]
)
def test_metric_start(start: int | str, rates: list[float]) -> None:
    model, loss = mlp(*SIZES), criterion("categorical")
    optimizer = qd.QDOP(model, loss, lr=1e-3, gamma=0.2, metric_start=start)
    expected = torch.ones(4, dtype=torch.float64)  # of m00; the identity's, or forgotten at rate 1
    for seed, rate in enumerate(rates):
        x, t = batch("categorical", 6, *SIZES[::2], seed=seed)
        now = per_sample(model, loss, x, t)["0"].m00
        expected = (1 - rate) * expected + rate * now
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    torch.testing.assert_close(optimizer.moments(model[0]).m00, expected, **CLOSE)


@pytest.mark.parametrize("metric", ["outer-product", "exact", "backpropagated"])
def test_leading_dimensions_are_more_samples(metric: str) -> None:
    flat, deep = mlp(*SIZES), mlp(*SIZES)
    x, t = batch("categorical", 12, *SIZES[::2])
    optimizers = [
        one_step(flat, criterion("categorical"), x, t, metric),
        one_step(deep, criterion("categorical"), x.view(2, 3, 2, 5), t.view(2, 3, 2), metric),
    ]
    for a, b in zip(linear_layers(flat), linear_layers(deep), strict=True):
        one, other = optimizers[0].moments(a), optimizers[1].moments(b)
        torch.testing.assert_close(one.m0i, other.m0i, **CLOSE)
        torch.testing.assert_close(one.mii, other.mii, **CLOSE)
        torch.testing.assert_close(a.weight, b.weight, **CLOSE)


@pytest.mark.parametrize("metric", ["outer-product", "monte-carlo", "exact", "backpropagated"])
def test_dropout_metric_sees_the_gradient_s_mask(metric: str) -> None:
    torch.manual_seed(1)
    linear = [nn.Linear(5, 16, dtype=torch.float64), nn.Linear(16, 3, dtype=torch.float64)]
    model = nn.Sequential(linear[0], nn.Sigmoid(), nn.Dropout(0.5), linear[1])
    loss = criterion("categorical")
    x, t = batch("categorical", 1, 5, 3)
    optimizer = one_step(model, loss, x, t, metric)
    dropped = linear[1].weight.grad.abs().sum(0) == 0
    assert 0 < dropped.sum() < 16
    assert torch.equal(optimizer.moments(linear[1]).mii.sum(0) == 0, dropped)
    assert torch.equal(optimizer.moments(linear[0]).m00 == 0, dropped)


def test_ignored_targets_are_in_neither_gradient_nor_metric() -> None:
    whole, part = mlp(*SIZES), mlp(*SIZES)
    x, t = batch("categorical", 8, *SIZES[::2])
    some = t.clone()
    some[5:] = -100
    for metric in ("outer-product", "exact"):
        a = one_step(whole, criterion("categorical"), x, some, metric)
        b = one_step(part, criterion("categorical"), x[:5], t[:5], metric)
        torch.testing.assert_close(a.moments(whole[0]).mii, b.moments(part[0]).mii, **CLOSE)
        a.close(), b.close()
        whole.zero_grad(), part.zero_grad()


@pytest.mark.parametrize("metric", ["outer-product", "exact"])
def test_a_share_of_the_minibatch_has_the_metric_of_those_samples(metric: str) -> None:
    model, loss = mlp(*SIZES), criterion("categorical")
    x, t = batch("categorical", 12, SIZES[0], SIZES[-1])
    before = {name: p.clone() for name, p in model.named_parameters()}
    share = one_step(model, loss, x, t, metric, metric_fraction=0.5)
    share.close()
    model.load_state_dict(before)
    few = one_step(model, loss, x[:6], t[:6], metric)
    for layer in linear_layers(model):
        for got, expected in zip(share.moments(layer), few.moments(layer)):
            torch.testing.assert_close(got, expected, **CLOSE)
