"""Natural Langevin dynamics against posteriors that are known, and dense matrices, float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, mlp
from quasidiag.langevin import root_of
from quasidiag.reference import completion

CHAINS, STD, PRIOR = 1500, 0.5, 0.8


def regression(inputs: int, n: int = 12) -> tuple[Tensor, Tensor]:
    """Few points, far from centred, so that prior and data both matter."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(n, inputs, generator=random, dtype=torch.float64) + 1.0
    t = x.sum(1, keepdim=True) - 0.5 + STD * torch.randn(n, 1, generator=random, dtype=x.dtype)
    return x, t


def posterior_of(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of (bias, weights), in closed form."""
    design = torch.cat([torch.ones_like(x[:, :1]), x], dim=1)
    precision = (
        design.T @ design / STD**2
        + torch.diag(torch.tensor([1.0] + [x.shape[1]] * x.shape[1])) / PRIOR**2
    )
    covariance = torch.linalg.inv(precision)
    return (covariance @ design.T @ t / STD**2).squeeze(1), covariance


def chains(x: Tensor, t: Tensor, lr: float, steps: int, **options: Any) -> Tensor:
    """``[samples, 1 + inputs]``: every unit of one wide layer is a chain of its own, all with the same posterior."""
    model = nn.Linear(x.shape[1], CHAINS, dtype=torch.float64)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    criterion, targets = qd.Gaussian(STD), t.expand(-1, CHAINS)
    optimizer = qd.Langevin(
        model,
        criterion,
        lr=lr,
        data_size=len(x),
        prior=PRIOR,
        metric="backpropagated",  # of one layer with Gaussian outputs it is exact
        metric_every=10**6,  # and the same at all parameters
        **options,
    )
    kept = []
    for step in range(steps):
        optimizer.zero_grad()
        criterion(model(x), targets).backward()
        optimizer.step()
        if step >= steps // 3 and step % int(1 / lr) == 0:
            kept.append(torch.cat([model.bias.unsqueeze(1), model.weight], 1).detach().clone())
    return torch.cat(kept)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize(("reduction", "inputs"), [("quasi-diagonal", 1), ("unitwise", 3)])
def test_linear_regression_has_its_posterior(
    reduction: str, inputs: int, temperature: float
) -> None:
    x, t = regression(inputs)
    lr = 0.1
    samples = chains(x, t, lr, 240, reduction=reduction, temperature=temperature)
    mean, covariance = posterior_of(x, t)
    covariance = temperature * covariance / (1 - lr / 2)  # exactly that of steps of this length
    scale = covariance.diagonal().sqrt()
    assert ((samples.mean(0) - mean) / scale).abs().max() < 0.03
    ratio = torch.cov(samples.T) / torch.outer(scale, scale)
    expected = covariance / torch.outer(scale, scale)
    assert (expected - torch.eye(1 + inputs)).abs().max() > 0.3  # correlations matter
    torch.testing.assert_close(ratio, expected, rtol=0, atol=0.04)


def test_a_diagonal_metric_has_it_too_for_small_steps() -> None:
    """Another metric takes another way to the same posterior."""
    x, t = regression(1)
    samples = chains(x, t, 0.05, 900, reduction="diagonal")
    mean, covariance = posterior_of(x, t)
    scale = covariance.diagonal().sqrt()
    assert ((samples.mean(0) - mean) / scale).abs().max() < 0.1
    ratio = torch.cov(samples.T) / torch.outer(scale, scale)
    torch.testing.assert_close(ratio, covariance / torch.outer(scale, scale), rtol=0, atol=0.1)


def network(reduction: str = "quasi-diagonal", **options: Any) -> tuple[Any, ...]:
    model, criterion = mlp(3, 4, 2, seed=1), qd.Categorical()
    optimizer = qd.Langevin(
        model,
        criterion,
        lr=0.01,
        data_size=50,
        prior=1.0,
        metric="exact",
        reduction=reduction,
        **options,
    )
    return model, criterion, optimizer


def step(model: nn.Module, criterion: nn.Module, optimizer: Any, seed: int = 0) -> None:
    x, t = batch("categorical", 20, 3, 2, seed=seed)
    optimizer.zero_grad()
    criterion(model(x), t).backward()
    optimizer.step()


def dense(optimizer: qd.Langevin, layer: nn.Linear, unit: int) -> Tensor:
    """A unit's metric with its prior, completed."""
    m00, m0i, mii = optimizer.moments(layer)
    assert m00 is not None and m0i is not None and mii is not None
    prior = torch.tensor([1.0] + [layer.in_features] * layer.in_features, dtype=torch.float64)
    diagonal = torch.cat([m00[unit : unit + 1], mii[unit]]) + prior / optimizer.data_size
    return completion(diagonal, m0i[unit])


@pytest.mark.parametrize("reduction", ["quasi-diagonal", "unitwise"])
def test_a_root_of_the_metric_with_its_prior(reduction: str) -> None:
    model, criterion, optimizer = network(reduction)
    step(model, criterion, optimizer)
    for block in optimizer._blocks:
        kept = optimizer.state[block.weight]
        assert reduction == "unitwise" or kept["shift"].abs().max() > 0.1
        half = root_of(block, optimizer.state, [optimizer._precision(p) for p in block.parameters])
        size = 1 + block.module.in_features
        for unit in range(block.module.out_features):
            columns = []
            for u in torch.eye(size, dtype=torch.float64):
                w0, wi = half.step(u.expand(block.module.out_features, -1))
                columns.append(torch.cat([w0[unit : unit + 1], wi[unit]]))
            inverse = torch.stack(columns, 1) @ torch.stack(columns, 1).T
            metric = dense(optimizer, block.module, unit)
            if reduction == "unitwise":
                apart = ~torch.eye(size, dtype=torch.bool)
                metric[apart] = kept["block"][unit][apart]
            expected = torch.linalg.inv(metric)
            torch.testing.assert_close(inverse, expected)


def test_the_noise_has_the_covariance_of_the_inverse_metric() -> None:
    model, criterion, optimizer = network(metric_every=10**6)
    step(model, criterion, optimizer)
    start = copy.deepcopy(model.state_dict())
    layer, drawn = model[0], []
    for _ in range(1000):
        model.load_state_dict(start)
        step(model, criterion, optimizer)
        drawn.append(torch.cat([layer.bias.unsqueeze(1), layer.weight], 1).detach())
    for unit in range(layer.out_features):
        measured = torch.cov(torch.stack(drawn)[:, unit].T)
        expected = 2 * 0.01 / 50 * torch.linalg.inv(dense(optimizer, layer, unit))
        scale = expected.diagonal().sqrt()
        scale = torch.outer(scale, scale)
        torch.testing.assert_close(measured / scale, expected / scale, rtol=0, atol=0.16)
    between = torch.corrcoef(torch.stack(drawn)[:, :, 0].T) - torch.eye(layer.out_features).double()
    assert between.abs().max() < 0.13


class Odd(nn.Module):
    """A layer, and a parameter in none; the criterion has one more."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2, bias=bias)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


@pytest.mark.filterwarnings("ignore:no block structure")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
def test_without_noise_it_is_riemannian_descent_of_the_posterior(
    reduction: str, bias: bool
) -> None:
    x, t = batch("gaussian", 20, 1, 2)
    torch.manual_seed(0)
    left, loss = Odd(bias).double(), qd.LearnedGaussian(2).double()
    right, twin = copy.deepcopy(left), copy.deepcopy(loss)
    n, prior = 40, 0.5
    options: dict[str, Any] = dict(lr=0.01, metric="exact", reduction=reduction)
    cold = qd.Langevin(left, loss, data_size=n, prior=prior, temperature=0.0, **options)
    plain = qd.Riemannian(right, twin, eps=1 / (n * prior**2), floor=0.0, **options)
    for _ in range(5):
        cold.zero_grad()
        loss(left(x), t).backward()
        cold.step()
        plain.zero_grad()
        twin(right(x), t).backward()
        for p in plain._group:
            p.grad.add_(p.detach() / (n * prior**2))
        plain.step()
    pairs = [*zip(left.parameters(), right.parameters()), (loss.log_std, twin.log_std)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:no block structure")
def test_everything_is_stirred_and_the_same_seed_stirs_the_same() -> None:
    def run(seed: int, temperature: float = 1.0) -> list[Tensor]:
        torch.manual_seed(0)
        model, loss = Odd().double(), qd.LearnedGaussian(2).double()
        options: dict[str, Any] = dict(data_size=40, seed=seed, temperature=temperature)
        optimizer = qd.Langevin(model, loss, lr=0.01, metric="exact", **options)
        x, t = batch("gaussian", 20, 1, 2)
        loss(model(x), t).backward()
        optimizer.step()
        return [p.detach().clone() for p in (*model.parameters(), *loss.parameters())]

    assert all(map(torch.equal, run(0), run(0)))
    for other in (run(1), run(0, temperature=0.0)):
        assert not any(map(torch.equal, run(0), other))


def test_a_frozen_bias_leaves_a_diagonal() -> None:
    model, criterion, optimizer = network()
    step(model, criterion, optimizer)
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    step(model, criterion, optimizer)
    assert torch.equal(model[0].bias, before["0.bias"])
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_resume_is_bit_for_bit() -> None:
    def three(metric: str) -> tuple[Any, ...]:
        model, criterion = mlp(3, 4, 2, seed=1), qd.Categorical()
        return (
            model,
            criterion,
            qd.Langevin(model, criterion, lr=0.01, data_size=50, metric=metric, seed=5),
        )

    for metric in ("monte-carlo", "outer-product"):
        through = three(metric)
        for seed in range(6):
            step(*through, seed=seed)
            if seed == 2:
                saved = copy.deepcopy((through[0].state_dict(), through[2].state_dict()))
        resumed = three(metric)
        resumed[0].load_state_dict(saved[0])
        resumed[2].load_state_dict(saved[1])
        for seed in range(3, 6):
            step(*resumed, seed=seed)
        assert all(map(torch.equal, through[0].parameters(), resumed[0].parameters()))


def test_a_copy_goes_on_alike() -> None:
    model, criterion, optimizer = network()
    step(model, criterion, optimizer)
    both = copy.deepcopy((model, criterion, optimizer))
    step(model, criterion, optimizer)
    step(*both)
    assert all(map(torch.equal, model.parameters(), both[0].parameters()))


def test_a_scheduler_may_stop_it() -> None:
    model, criterion, optimizer = network()
    step(model, criterion, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    step(model, criterion, optimizer)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(data_size=9), "give an lr"),
        (dict(lr=0.1, data_size=9, step="auto"), "give an lr"),
        (dict(lr=0.1), "needs data_size"),
        (dict(lr=0.1, data_size=0), "data_size must be a whole number"),
        (dict(lr=0.1, data_size=9, temperature=-1.0), "temperature must be"),
        (dict(lr=0.1, data_size=9, prior=0.0), "prior must be"),
        (dict(lr=0.1, data_size=9, prior=-1.0), "prior must be"),
        (dict(lr=0.1, data_size=9, momentum=0.9), "momentum would make"),
        (dict(lr=0.1, data_size=9, weight_decay=0.1), "weight_decay would make"),
        (dict(lr=0.1, data_size=9, maximize=True), "maximize would make"),
        (dict(lr=0.1, data_size=9, eps=1e-3), "takes the place of eps"),
        (dict(lr=0.1, data_size=9, capturable=True), "no capturable"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qd.Langevin(mlp(3, 2), qd.Categorical(), **options)


def test_it_has_no_gradient_to_give() -> None:
    model, criterion, optimizer = network()
    with pytest.raises(TypeError, match=r"use step\(\)"):
        optimizer.precondition_()
    del model, criterion


def test_groups_have_priors_of_their_own() -> None:
    model = mlp(3, 4, 2)
    groups = [{"params": model[0].parameters(), "prior": 2.0}, {"params": model[2].parameters()}]
    optimizer = qd.Langevin(model, qd.Categorical(), lr=0.1, data_size=10, prior=1.0, params=groups)
    assert optimizer._precision(model[0].weight) == 3 / 40
    assert optimizer._precision(model[2].weight) == 4 / 10
    assert optimizer._precision(model[2].bias) == 1 / 10


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduction", ["quasi-diagonal", "diagonal", "unitwise"])
def test_a_safeguard_counts_in_each_reduction(reduction: str, frozen: bool) -> None:
    found = []
    for safeguard in (None, (10.0, 10.0, 10.0)):
        model, criterion, optimizer = network(reduction, safeguard=safeguard, temperature=0.0)
        model[0].bias.requires_grad_(not frozen)
        for seed in range(3):
            step(model, criterion, optimizer, seed)
        found.append(model[0].weight.detach())
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_the_prior_of_a_lookup_table_does_not_depend_on_its_size() -> None:
    """A sample sees one of its rows, as a unit with one input does."""
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(4, 2), nn.LayerNorm(2))
    optimizer = qd.Langevin(model, qd.Categorical(), lr=0.1, data_size=10, prior=1.0)
    assert optimizer._precision(model[0].weight) == 1 / 10
    assert optimizer._precision(model[2].weight) == 4 / 10
    assert optimizer._precision(model[3].weight) == 1 / 10


def test_a_posterior_keeps_what_it_collected() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[0].eval()
    posterior, expected, x = qd.Posterior(model), [], torch.randn(5, 3)
    with pytest.raises(RuntimeError, match="no sample yet"):
        posterior(x)
    for _ in range(3):
        with torch.no_grad():
            [p.add_(torch.randn_like(p)) for p in model.parameters()]
            model(torch.randn(8, 3))
            expected.append(copy.deepcopy(model).eval()(x))
        posterior.collect()
    last = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(posterior(x), torch.stack(expected))
    assert len(posterior) == 3 and model.training and not model[0].training
    assert all(map(torch.equal, model.state_dict().values(), last.values()))


def test_a_posterior_of_tied_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    posterior = qd.Posterior(model)
    posterior.collect()
    x = torch.randn(2, 3)
    torch.testing.assert_close(posterior(x)[0], model(x).detach())


def test_a_posterior_of_a_model_that_returns_a_tuple_says_so() -> None:
    posterior = qd.Posterior(nn.GRU(3, 4))
    posterior.collect()
    with pytest.raises(TypeError, match="GRU returns a tuple, and a Posterior stacks tensors"):
        posterior(torch.randn(5, 2, 3))
    assert posterior.model.training


def test_a_layer_that_thaws_waits_for_its_metric() -> None:
    model, criterion = mlp(3, 4, 2), qd.Categorical()
    model[0].requires_grad_(False)
    optimizer = qd.Langevin(model, criterion, lr=0.01, data_size=50, metric_every=3)
    x, t = batch("categorical", 8, 3, 2)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    for thawed in (False, True, True, True):
        model[0].requires_grad_(thawed)
        optimizer.zero_grad()
        criterion(model(x), t).backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
    assert not torch.equal(before, model[0].weight)
