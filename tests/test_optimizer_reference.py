"""Each of the paper's eight algorithms follows the plain-number reference, step for step, to 1e-10."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import quasidiag as qd
from nets import OUTPUTS, STD, batch, criterion, linear_layers, mlp
from quasidiag import reference
from test_moments import Recording

SIZES, BATCH, STEPS = (4, 5, 3), 20, 8
RATES = {"SGD": 0.1}
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "DOP": qd.DOP,
    "QDOP": qd.QDOP,
    "DMCNat": qd.DMCNat,
    "QDMCNat": qd.QDMCNat,
    "DNat": qd.DNat,
    "QDNat": qd.QDNat,
}


def follow(
    algorithm: str,
    output: str = "categorical",
    activation: str = "sigmoid",
    momentum: float = 0.0,
    **options: float | None,
) -> None:
    model, loss = mlp(*SIZES, activation=activation), criterion(output)
    chain = reference.Chain.of(linear_layers(model), activation=activation, output=output, std=STD)
    lr = RATES.get(algorithm, 0.01)
    drawn = Recording.of(loss)
    if algorithm == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    elif algorithm == "AdaGrad":
        optimizer = qd.AdaGrad(model.parameters(), lr=lr, **options)
    else:
        optimizer = MAKERS[algorithm](model, loss, lr=lr, momentum=momentum, **options)
    start = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        x, t = batch(output, BATCH, SIZES[0], SIZES[-1], seed=step)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
        draws = [d.reshape(BATCH, -1).tolist() for d in drawn]
        drawn.clear()
        chain.train_step(
            algorithm,
            x.tolist(),
            t.reshape(BATCH, -1).tolist(),
            lr=lr,
            momentum=momentum,
            draws=draws,
            **options,
        )
        for layer, units in zip(linear_layers(model), chain.blocks, strict=True):
            block = torch.tensor(units, dtype=torch.float64)
            torch.testing.assert_close(layer.bias.detach(), block[:, 0], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(layer.weight.detach(), block[:, 1:], rtol=1e-10, atol=1e-10)
    moved = max((p - q).abs().max() for p, q in zip(model.parameters(), start, strict=True))
    assert moved > 1e-3


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("algorithm", list(reference.ALGORITHMS))
def test_paper_s_defaults(algorithm: str, output: str) -> None:
    follow(algorithm, output)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("algorithm", list(reference.ALGORITHMS))
def test_other_activations(algorithm: str, activation: str) -> None:
    follow(algorithm, activation=activation)


@pytest.mark.parametrize("algorithm", ["SGD", *MAKERS])
def test_momentum(algorithm: str) -> None:
    follow(algorithm, momentum=0.9)


@pytest.mark.parametrize(
    "options", [{"eps": 1e-3}, {"eps": 1e-3, "floor": 1e-2}, {"eps": 0.0, "floor": 0.0}]
)
@pytest.mark.parametrize("algorithm", list(MAKERS))
def test_regularizers(algorithm: str, options: dict[str, float]) -> None:
    follow(algorithm, gamma=0.3, **options)


def test_presets_are_the_general_class_with_a_metric_and_a_reduction() -> None:
    for name, maker in MAKERS.items():
        models = [mlp(*SIZES), mlp(*SIZES)]
        metric, reduction = reference.ALGORITHMS[name]
        optimizers = [
            maker(models[0], criterion("categorical"), lr=0.03),
            qd.Riemannian(
                models[1], criterion("categorical"), lr=0.03, metric=metric, reduction=reduction
            ),
        ]
        for model, optimizer in zip(models, optimizers, strict=True):
            assert isinstance(optimizer, qd.Riemannian)
            for seed in range(3):
                x, t = batch("categorical", BATCH, SIZES[0], SIZES[-1], seed=seed)
                optimizer.zero_grad()
                optimizer.criterion(model(x), t).backward()
                optimizer.step()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert torch.equal(p, q)


def test_without_a_bias_the_reduction_is_diagonal() -> None:
    models = [mlp(*SIZES, bias=False), mlp(*SIZES, bias=False)]
    for model, maker in zip(models, (qd.DOP, qd.QDOP), strict=True):
        loss = criterion("categorical")
        optimizer = maker(model, loss, lr=0.05)
        for seed in range(3):
            x, t = batch("categorical", BATCH, SIZES[0], SIZES[-1], seed=seed)
            optimizer.zero_grad()
            loss(model(x), t).backward()
            optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=0)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: nn.Module, steps: int = 3
) -> None:
    for seed in range(steps):
        x, t = batch("categorical", BATCH, SIZES[0], SIZES[-1], seed=seed)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_lr_as_a_tensor() -> None:
    models = [mlp(*SIZES), mlp(*SIZES)]
    for model, lr in zip(models, (0.05, torch.tensor(0.05, dtype=torch.float64)), strict=True):
        loss = criterion("categorical")
        train(model, qd.QDOP(model, loss, lr=lr), loss)
    same(*models)


def test_maximize_is_minimizing_the_opposite() -> None:
    up, down = mlp(*SIZES), mlp(*SIZES)
    t = torch.randn(BATCH, 3, dtype=torch.float64)
    x = batch("gaussian", BATCH, *SIZES[::2])[0]
    for model, maximize, sign in ((up, True, -1), (down, False, 1)):
        optimizer = qd.QDOP(model, lr=0.05, maximize=maximize)
        for _ in range(3):
            optimizer.zero_grad()
            (sign * (model(x) - t).square().sum() / BATCH).backward()
            optimizer.step()
    same(up, down)


def test_weight_decay_is_decoupled() -> None:
    plain, decayed = mlp(*SIZES), mlp(*SIZES)
    before = [p.detach().clone() for p in plain.parameters()]
    for model, decay in ((plain, 0.0), (decayed, 0.1)):
        loss = criterion("categorical")
        train(model, qd.QDOP(model, loss, lr=0.05, weight_decay=decay), loss, steps=1)
    for p, q, b in zip(plain.parameters(), decayed.parameters(), before, strict=True):
        torch.testing.assert_close(q, p - 0.05 * 0.1 * b, rtol=1e-10, atol=1e-14)


def test_param_groups_have_their_own_settings() -> None:
    """Layer by layer, two groups do what two optimizers with those settings would."""
    model, loss = mlp(*SIZES), criterion("categorical")
    settings = ({"lr": 0.05, "gamma": 0.5, "eps": 1e-2}, {"lr": 0.01, "gamma": 0.1, "eps": 1e-6})
    groups = [
        {"params": list(model[i].parameters()), **s} for i, s in zip((0, 2), settings, strict=True)
    ]
    optimizer = qd.QDOP(model, loss, params=groups)
    twin, twin_loss = mlp(*SIZES), criterion("categorical")
    for seed in range(4):
        x, t = batch("categorical", BATCH, SIZES[0], SIZES[-1], seed=seed)
        if seed == 0:
            pair = [
                qd.QDOP(twin, twin_loss, params=[{"params": list(twin[i].parameters()), **s}])
                for i, s in zip((0, 2), settings, strict=True)
            ]
        for net, criterion_, optimizers in ((model, loss, [optimizer]), (twin, twin_loss, pair)):
            net.zero_grad()
            criterion_(net(x), t).backward()
            for o in optimizers:
                o.step()
    same(model, twin)


def test_precondition_in_front_of_sgd_is_the_step() -> None:
    models = [mlp(*SIZES), mlp(*SIZES)]
    loss = criterion("categorical")
    train(models[0], qd.QDNat(models[0], loss, lr=0.05), loss)
    other = criterion("categorical")
    metric = qd.QDNat(models[1], other)
    sgd = torch.optim.SGD(models[1].parameters(), lr=0.05)
    for seed in range(3):
        x, t = batch("categorical", BATCH, SIZES[0], SIZES[-1], seed=seed)
        sgd.zero_grad()
        other(models[1](x), t).backward()
        metric.precondition_()
        sgd.step()
    same(*models)


def test_other_parameters_follow_the_documented_diagonal_rule() -> None:
    """A bare parameter gets AdaGrad's rule, and one warning that names it."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(*SIZES)
            self.scale = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.net(x)

    model, loss = Scaled(), criterion("categorical")
    with pytest.warns(UserWarning, match="Scaled"):
        optimizer = qd.QDOP(model, loss, lr=0.05, gamma=0.2)
    scale, square = model.scale.detach().clone(), None
    for seed in range(3):
        x, t = batch("categorical", BATCH, SIZES[0], SIZES[-1], seed=seed)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        g = model.scale.grad.clone()
        square = g**2 if square is None else 0.8 * square + 0.2 * g**2
        scale -= 0.05 * g / (square.sqrt() + 1e-8)
        optimizer.step()
    torch.testing.assert_close(model.scale.detach(), scale, rtol=1e-10, atol=0)


def test_adagrad_without_eps_does_not_move_what_never_had_a_gradient() -> None:
    p = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = qd.AdaGrad([p], lr=0.1, eps=0.0)
    p.grad = torch.tensor([0.0, 3.0])
    optimizer.step()
    assert p.tolist() == pytest.approx([1.0, 0.9])
