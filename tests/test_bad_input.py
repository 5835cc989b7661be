"""Bad input: an error that names the culprit and says what to do, and nothing has moved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, criterion, mlp

METRICS = ["outer-product", "monte-carlo", "exact", "backpropagated"]


def trained(metric: str = "outer-product", **options: object) -> tuple:
    """A model, criterion and optimizer after one good step, with the batch."""
    model, loss = mlp(5, 4, 3), criterion("categorical")
    optimizer = qd.Riemannian(model, loss, lr=0.01, metric=metric, **options)
    x, t = batch("categorical", 8, 5, 3)
    loss(model(x), t).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, loss, optimizer, x, t


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [p.detach().clone() for p in model.parameters()]
    for state in optimizer.state.values():
        tensors += [torch.as_tensor(value).clone() for value in state.values()]
    return tensors


@contextmanager
def unmoved(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = snapshot(model, optimizer)
    yield
    after = snapshot(model, optimizer)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_model_without_parameters() -> None:
    for model in (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(2, 2).requires_grad_(False))):
        with pytest.raises(ValueError, match="no parameter"):
            qd.QDOP(model, lr=0.1)


@pytest.mark.parametrize("metric", METRICS[1:])
def test_a_metric_without_its_criterion(metric: str) -> None:
    for wrong in (None, nn.CrossEntropyLoss()):
        with pytest.raises((TypeError, ValueError), match="criterion"):
            qd.Riemannian(mlp(5, 4, 3), wrong, lr=0.1, metric=metric)


@pytest.mark.parametrize("name", ["lr", "gamma", "eps", "floor", "momentum", "weight_decay"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_negative_or_non_finite_hyperparameters(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        qd.QDOP(mlp(5, 4, 3), **{"lr": 0.1, name: value})
    groups = [{"params": list(mlp(5, 4, 3).parameters()), name: value}]
    with pytest.raises(ValueError, match=name):
        qd.QDOP(mlp(5, 4, 3), lr=0.1, params=groups)


@pytest.mark.parametrize(
    "options",
    [
        {"metric": "fisher"},
        {"reduction": "full"},
        {"samples": 0},
        {"samples": 1.5},
        {"seed": "x"},
        {"seed": None},
        {"metric_every": 0},
        {"metric_fraction": 0.0},
        {"metric_fraction": 1.5},
        {"metric_fraction": "half"},
        {"safeguard": 0.1},
        {"metric_start": 0},
        {"metric_start": "last"},
        {"loss_reduction": "none"},
        {"gamma": 1.5},
        {"momentum": 1.5},
    ],
)
def test_other_arguments_out_of_range(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        qd.Riemannian(mlp(5, 4, 3), criterion("categorical"), lr=0.1, **options)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_adagrad_checks_its_numbers(value: float) -> None:
    for name in ("lr", "gamma", "eps"):
        with pytest.raises(ValueError, match=name):
            qd.AdaGrad(mlp(5, 4, 3).parameters(), **{"lr": 0.1, name: value})


def test_a_preset_has_its_own_metric() -> None:
    with pytest.raises(TypeError, match="Riemannian"):
        qd.QDOP(mlp(5, 4, 3), lr=0.1, metric="exact")


@pytest.mark.parametrize("metric", METRICS)
def test_a_step_without_a_backward_pass(metric: str) -> None:
    model, loss, optimizer, x, t = trained(metric)
    for forward in (False, True):
        if forward:
            loss(model(x), t)
        with unmoved(model, optimizer), pytest.raises(RuntimeError, match="backward"):
            optimizer.step()
    fresh = qd.Riemannian(mlp(5, 4, 3), criterion("categorical"), lr=0.1, metric=metric)
    with pytest.raises(RuntimeError, match="backward"):
        fresh.step()


@pytest.mark.parametrize("metric", METRICS)
def test_a_first_batch_that_the_metric_did_not_see(metric: str) -> None:
    """A forward pass made in evaluation mode, or a loss that is not the criterion's."""
    model, loss = mlp(5, 4, 3), criterion("categorical")
    x, t = batch("categorical", 8, 5, 3)
    optimizer = qd.Riemannian(model, loss, lr=0.1, metric=metric)
    model.eval()
    loss(model(x), t).backward()
    with unmoved(model, optimizer), pytest.raises(RuntimeError, match="train"):
        optimizer.step()
    model.train()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), t).backward()
    with unmoved(model, optimizer), pytest.raises(RuntimeError, match="criterion"):
        optimizer.step()


TARGETS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "shape of classes": ("categorical", lambda: torch.zeros(7, dtype=torch.long)),
    "one-hot classes": ("categorical", lambda: torch.zeros(8, 3, dtype=torch.long)),
    "class too large": ("categorical", lambda: torch.full((8,), 3)),
    "negative class": ("categorical", lambda: torch.full((8,), -1)),
    "classes as floats": ("categorical", lambda: torch.zeros(8)),
    "classes in 32 bits": ("categorical", lambda: torch.zeros(8, dtype=torch.int32)),
    "shape of values": ("gaussian", lambda: torch.zeros(8, 1, dtype=torch.float64)),
    "transposed values": ("gaussian", lambda: torch.zeros(3, 8, dtype=torch.float64)),
    "shape of coins": ("bernoulli", lambda: torch.zeros(8, dtype=torch.float64)),
    "coin above one": ("bernoulli", lambda: torch.full((8, 3), 1.5, dtype=torch.float64)),
    "negative coin": ("bernoulli", lambda: torch.full((8, 3), -0.5, dtype=torch.float64)),
}


@pytest.mark.parametrize("case", list(TARGETS))
def test_targets_of_the_wrong_shape_or_out_of_range(case: str) -> None:
    output, target = TARGETS[case]
    model, loss = mlp(5, 4, 3), criterion(output)
    optimizer = qd.QDMCNat(model, loss, lr=0.01)
    x, good = batch(output, 8, 5, 3)
    with unmoved(model, optimizer), pytest.raises((ValueError, TypeError), match="target"):
        loss(model(x), target())
    optimizer.zero_grad()
    loss(model(x), good).backward()
    optimizer.step()  # and it goes on from there


@pytest.mark.parametrize("given", ["generator", "list", "tensor"])
def test_parameters_in_the_place_of_the_model(given: str) -> None:
    for make in (qd.Riemannian, qd.QDOP):
        model = mlp(5, 4, 3)
        wrong = {
            "generator": model.parameters(),
            "list": list(model.parameters()),
            "tensor": model[0].weight,
        }
        with pytest.raises(TypeError, match="give the model itself"):
            make(wrong[given], criterion("categorical"))


@pytest.mark.parametrize("size", [1, 2, 4, (8, 3), ()])
def test_a_learned_deviation_for_each_output_and_no_other(size: object) -> None:
    loss = qd.LearnedGaussian(size).double()  # type: ignore[arg-type]
    x, t = batch("gaussian", 8, 5, 3)
    with pytest.raises(ValueError, match=r"LearnedGaussian\(\(3,\)\)"):
        loss(mlp(5, 4, 3)(x), t)


@pytest.mark.parametrize("sizes", [(4,), (8, 3), (1, 1)])
def test_given_deviations_that_do_not_fit(sizes: tuple[int, ...]) -> None:
    x, t = batch("gaussian", 8, 5, 3)
    with pytest.raises(ValueError, match="std of shape"):
        qd.Gaussian(torch.ones(sizes))(mlp(5, 4, 3)(x), t)


@pytest.mark.parametrize("output", ["categorical", "gaussian", "bernoulli"])
def test_an_empty_batch(output: str) -> None:
    model, loss = mlp(5, 4, 3), criterion(output)
    x, t = batch(output, 8, 5, 3)
    with pytest.raises(ValueError, match="no sample"):
        loss(model(x[:0]), t[:0])


def test_samples_without_a_position() -> None:
    with pytest.raises(ValueError, match="no sample"):
        qd.Categorical()(torch.zeros(4, 0, 3), torch.zeros(4, 0, dtype=torch.int64))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_empty_batch_without_a_criterion(reduction: str) -> None:
    model, loss = mlp(5, 4, 3), nn.MSELoss(reduction=reduction)
    optimizer = qd.QDOP(model, lr=0.1, loss_reduction=reduction)
    x, t = batch("gaussian", 8, 5, 3)
    loss(model(x), t).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss(model(x[:0]), t[:0]).backward()
    with unmoved(model, optimizer), pytest.raises(RuntimeError, match="empty"):
        optimizer.step()


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan, math.inf])
def test_standard_deviations_that_are_none(std: float) -> None:
    with pytest.raises(ValueError, match="std"):
        qd.Gaussian(std)
    with pytest.raises(ValueError, match="min_std"):
        qd.LearnedGaussian(3, min_std=std)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("poison", ["input", "loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_batch_is_reported_and_skipped(metric: str, poison: str, value: float) -> None:
    model, loss, optimizer, x, t = trained(metric)
    bad = x.clone()
    if poison == "input":
        bad[3, 2] = value
    total = loss(model(bad), t) * (value if poison == "loss" else 1.0)
    total.backward()
    with unmoved(model, optimizer), pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    # The run goes on as if that batch had never been.
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(model(x), t).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    if metric != "monte-carlo":  # whose draws may have been spent
        other, other_loss, twin, _, _ = trained(metric)
        other_loss(other(x), t).backward()
        twin.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_non_finite_first_batch_sets_no_metric() -> None:
    model, loss = mlp(5, 4, 3), criterion("categorical")
    optimizer = qd.QDOP(model, loss, lr=0.01)
    x, t = batch("categorical", 8, 5, 3)
    loss(model(x * math.nan), t).backward()
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="no moments yet"):
        optimizer.moments(model[0])
    optimizer.zero_grad()
    loss(model(x), t).backward()
    optimizer.step()
    assert torch.isfinite(optimizer.moments(model[0]).mii).all()


def test_a_non_finite_batch_can_be_an_error_instead() -> None:
    model, loss, optimizer, x, t = trained(nonfinite="raise")
    loss(model(x * math.nan), t).backward()
    with unmoved(model, optimizer), pytest.raises(FloatingPointError, match=r"0\.(weight|bias)"):
        optimizer.step()


def test_sparse_gradients() -> None:
    model, loss, optimizer, x, t = trained()
    loss(model(x), t).backward()
    model[0].weight.grad = model[0].weight.grad.to_sparse()
    with unmoved(model, optimizer), pytest.raises(TypeError, match=r"0\.weight.*sparse"):
        optimizer.step()


def test_complex_parameters() -> None:
    model = nn.Linear(3, 2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="complex"):
        qd.QDOP(model, lr=0.1)


def test_moments_of_a_layer_that_is_not_watched() -> None:
    model, _, optimizer, _, _ = trained()
    with pytest.raises(KeyError, match="Sigmoid"):
        optimizer.moments(model[1])


def train_once(model: nn.Module, optimizer: qd.Riemannian, x: Tensor, t: Tensor) -> None:
    optimizer.criterion(model(x), t).backward()
    optimizer.step()


def test_backpropagated_metric_beyond_chains_says_why() -> None:
    """Mixing units between layers, or a layer that is not Linear, is not a chain."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            a = self.one(x).sigmoid()
            return self.two(a) + a

    softmax = nn.Sequential(nn.Linear(5, 4), nn.Softmax(-1), nn.Linear(4, 3))
    for model in (softmax, Skip()):
        loss = qd.Categorical()
        optimizer = qd.Riemannian(model, loss, lr=0.1, metric="backpropagated")
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(TypeError, match="backpropagated"):
            train_once(model, optimizer, torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.judged, self.other = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).tanh()
        return self.judged(hidden), self.other(hidden)


@pytest.mark.parametrize("metric", ["monte-carlo", "outer-product"])
def test_a_head_that_the_criterion_does_not_judge_is_named(metric: str) -> None:
    model, loss = TwoHeads(), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=1e-3, metric=metric)
    judged, other = model(torch.randn(20, 4))
    (loss(judged, torch.randint(3, (20,))) + other.square().mean()).backward()
    if metric == "outer-product":
        optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="other has a gradient, but the criterion's output"):
            optimizer.step()


def test_large_gradients_in_float16_are_finite() -> None:
    """The sum of their squares is not."""
    model, loss = nn.Linear(400, 300).half(), qd.Gaussian()
    optimizer = qd.QDOP(model, loss, lr=1e-3)
    x, t = torch.ones(4, 400).half(), torch.zeros(4, 300).half()
    (loss(model(x), t) * 1.0).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(300.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_preset_has_a_fixed_step() -> None:
    assert qd.QDNat(mlp(5, 4, 3), qd.Categorical(), lr=None).auto is None


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("lr", [None, 0.01])
@pytest.mark.parametrize("at", [0, 8, 9])
def test_a_minibatch_whose_targets_are_all_ignored_is_skipped(
    metric: str, lr: float | None, at: int
) -> None:
    """Padding alone, say: its loss is nan, and its gradient zero. Whether the metric is due makes no difference."""
    model, loss = mlp(5, 4, 3), qd.Categorical()
    optimizer = qd.Riemannian(model, loss, lr=lr, metric=metric)
    for k in range(12):
        x, t = batch("categorical", 20, 5, 3, seed=k)
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        loss(model(x), t if k != at else torch.full_like(t, loss.ignore_index)).backward()
        if k == at:
            with pytest.warns(RuntimeWarning, match="all are ignored"):
                optimizer.step()
            torch.testing.assert_close([*model.parameters()], before)
        else:
            optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("lr", [None, 0.1])
@pytest.mark.parametrize("other", [nn.functional.cross_entropy, qd.Categorical()])
def test_a_loss_of_another_criterion_is_named_as_the_cause(
    lr: float | None, other: Callable
) -> None:
    model, loss = mlp(5, 4, 3), criterion("categorical")
    optimizer = qd.Riemannian(model, loss, lr=lr)
    x, t = batch("categorical", 8, 5, 3)
    other(model(x), t).backward()
    said = r"the very criterion object .* criterion\(model\(x\), t\), not from F\.cross_entropy or another criterion"
    with unmoved(model, optimizer), pytest.raises(RuntimeError, match=said):
        optimizer.step()
