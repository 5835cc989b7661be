"""The exact metric is the Fisher matrix, and Monte Carlo converges to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import OUTPUTS, STD, batch, criterion, mlp
from quasidiag import reference

SIZES = (4, 3, 5, 3)


def fisher(output: str, model: nn.Module, x: Tensor) -> Tensor:
    if output == "categorical":
        return reference.fisher_categorical(model, x)
    if output == "gaussian":
        return reference.fisher_gaussian(model, x, STD)
    return reference.fisher_bernoulli(model, x)


def metric_of(model: nn.Module, output: str, x: Tensor, **options: object) -> qd.Riemannian:
    loss = criterion(output)
    target = batch(output, len(x), SIZES[0], SIZES[-1])[1]
    optimizer = qd.Riemannian(model, loss, lr=1e-4, **options)
    loss(model(x), target).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_exact_metric_is_the_dense_fisher_matrix(output: str, activation: str) -> None:
    model = mlp(*SIZES, activation=activation)
    x, _ = batch(output, 6, SIZES[0], SIZES[-1])
    dense = fisher(output, model, x)
    torch.testing.assert_close(dense, dense.T)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    blocks = {name: reference.fisher_unit_matrices(dense, model, name) for name in names}
    optimizer = metric_of(model, output, x, metric="exact")
    for name in names:
        got, want = (
            optimizer.moments(model.get_submodule(name)),
            reference.unit_moments(blocks[name]),
        )
        for field in ("m00", "m0i", "mii"):
            torch.testing.assert_close(
                getattr(got, field), getattr(want, field), rtol=1e-10, atol=1e-12
            )


@pytest.mark.parametrize("output", OUTPUTS)
def test_unitwise_metric_keeps_the_whole_block(output: str) -> None:
    """The unitwise step is M⁻¹v with M the dense Fisher matrix's own diagonal blocks."""
    model, eps = mlp(*SIZES, seed=1), 1e-3
    x, t = batch(output, 6, SIZES[0], SIZES[-1])
    dense = fisher(output, model, x)
    before = [p.detach().clone() for p in model.parameters()]
    blocks = reference.fisher_unit_matrices(dense, model, "2")
    loss = criterion(output)
    optimizer = qd.Riemannian(
        model, loss, lr=1.0, metric="exact", reduction="unitwise", eps=eps, floor=0.0
    )
    loss(model(x), t).backward()
    v = torch.cat([model[2].bias.grad.unsqueeze(1), model[2].weight.grad], dim=1)
    optimizer.step()
    expected = torch.linalg.solve(blocks + eps * torch.eye(v.shape[1], dtype=v.dtype), v)
    got = torch.cat([(before[3] - model[2].bias).unsqueeze(1), before[2] - model[2].weight], dim=1)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("output", OUTPUTS)
def test_monte_carlo_converges_at_the_rate_of_one_over_root_samples(output: str) -> None:
    x, _ = batch(output, 5, SIZES[0], SIZES[-1])

    def moments(seed: int, **options: object) -> Tensor:
        model = mlp(*SIZES)
        return metric_of(model, output, x, seed=seed, **options).moments(model[0]).mii

    exact = moments(0, metric="exact")

    def error(samples: int) -> float:
        """Root mean square over seeds, relative."""
        squares = [
            (moments(seed, metric="monte-carlo", samples=samples) - exact).square().sum()
            for seed in range(12)
        ]
        return (torch.stack(squares).mean() / exact.square().sum()).sqrt().item()

    few, many = error(4), error(64)
    assert 2.4 < few / many < 6.5  # √(64/4) = 4
    assert many < 0.3


def test_monte_carlo_has_a_generator_of_its_own() -> None:
    x, _ = batch("categorical", 5, SIZES[0], SIZES[-1])
    models, found = [mlp(*SIZES) for _ in range(3)], []
    before = torch.get_rng_state()
    for model, seed in zip(models, (0, 0, 1), strict=True):
        optimizer = metric_of(model, "categorical", x, metric="monte-carlo", seed=seed)
        found.append(optimizer.moments(model[0]).mii)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(before, torch.get_rng_state())


def test_the_metrics_differ() -> None:
    """A test that all the others compare different things."""
    x, _ = batch("categorical", 5, SIZES[0], SIZES[-1])
    found = []
    for metric in ("outer-product", "monte-carlo", "exact", "backpropagated"):
        model = mlp(*SIZES)
        found.append(metric_of(model, "categorical", x, metric=metric).moments(model[0]).mii)
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(found[i], found[j], rtol=1e-3)


class Partial(qd.Gaussian):
    """Targets may be missing; its vectors are the same for all samples, and kept in one place."""

    unit = torch.eye(3, dtype=torch.float64)

    def counted(self, output: Tensor, target: Tensor) -> Tensor:
        return ~target.isnan().any(1, keepdim=True)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, torch.where(target.isnan(), output.detach(), target))

    def each_vector(self, output: Tensor) -> Iterator[Tensor]:
        yield from (row.expand_as(output) for row in self.unit)


def test_vectors_that_belong_to_the_criterion_are_left_alone() -> None:
    model, loss = mlp(4, 3), Partial(1.0)
    x, _ = batch("gaussian", 20, 4, 3)
    t = torch.zeros(20, 3, dtype=torch.float64)
    t[0, 1] = torch.nan
    optimizer = qd.Riemannian(model, loss, lr=1e-4, metric="exact")
    loss(model(x), t).backward()
    optimizer.step()
    m00 = optimizer.moments(model[0]).m00
    assert m00 is not None and torch.equal(loss.unit, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(m00, torch.full((3,), 0.95, dtype=torch.float64))


class Mixing(nn.Module):
    """Two positions, whose outputs depend on one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = mlp(4, 5), mlp(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x))).unflatten(1, (2, 3))


def test_positions_that_depend_on_the_same_units_are_drawn_apart() -> None:
    """Oracle: the Fisher matrix of one position after the other. Without signs their derivatives would be added first."""
    model, loss = Mixing(), qd.Categorical()
    x, t = torch.randn(6, 4, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.long)
    expected = torch.zeros(5, dtype=torch.float64)
    for position in (0, 1):
        h = model.hidden(x).detach().requires_grad_()
        y = model.out(torch.tanh(h)).unflatten(1, (2, 3))
        for vector in loss.vectors(y.detach()):
            (d,) = torch.autograd.grad(y[:, position], h, vector[:, position], retain_graph=True)
            expected += d.square().mean(0) / 2  # the loss is the mean over positions too
    optimizer = qd.Riemannian(model, loss, lr=0.0, metric="exact", metric_start=10**6)
    for _ in range(800):
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    found = optimizer.moments(model.hidden[0]).m00
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0.06, atol=0.0)
