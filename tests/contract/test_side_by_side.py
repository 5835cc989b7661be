"""Several models and optimizers at once, adversaries among them, and one criterion for two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, problem, train, values
from torch import Tensor, nn

import quasidiag as qd
from nets import mlp

COIN = METRICS[:3]


def adversaries(
    kind: str, shared: bool
) -> tuple[nn.Module, nn.Module, qd.Riemannian, qd.Riemannian, list]:
    generator, critic = mlp(3, 5, 2, seed=1), mlp(2, 6, 1, seed=2)
    losses = [qd.Bernoulli(), qd.Bernoulli()]
    if shared:
        losses[1] = losses[0]
    make: Callable[..., qd.Riemannian] = qd.Riemannian
    # The generator's output means nothing by itself; its metric comes through the critic, from the critic's output.
    of_generator = make(generator, losses[0], lr=0.01, metric=kind, seed=1)
    of_critic = make(critic, losses[1], lr=0.01, metric=kind, seed=2)
    return generator, critic, of_generator, of_critic, losses


def play(generator, critic, of_generator, of_critic, losses, order: str, rounds: int = 3) -> None:
    source = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        z = torch.randn(8, 3, generator=source, dtype=torch.float64)
        real = torch.randn(8, 2, generator=source, dtype=torch.float64) + 2
        one, zero = torch.ones(8, 1, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64)
        if order == "early":
            of_generator.zero_grad()
        fake = generator(z)
        of_critic.zero_grad()
        losses[1](critic(real), one).backward()
        losses[1](critic(fake.detach()), zero).backward()
        of_critic.step()
        if order == "late":
            of_generator.zero_grad()
        losses[0](critic(fake), one).backward()
        of_generator.step()


@pytest.mark.parametrize("order", ["early", "late"])
@pytest.mark.parametrize("kind", COIN)
def test_adversaries_may_share_their_criterion(kind: str, order: str) -> None:
    ends = []
    for shared in (False, True):
        generator, critic, *rest = adversaries(kind, shared)
        before = values(generator), values(critic)
        play(generator, critic, *rest, order)
        assert_moved(before[0], generator)
        assert_moved(before[1], critic)
        ends.append(values(generator) + values(critic) + metric(rest[0]) + metric(rest[1]))
    if kind != "monte-carlo":  # a critic that hears of the generator's loss draws for it, in vain
        assert_same(*ends)


@pytest.mark.parametrize("kind", COIN)
def test_the_critic_s_metric_is_of_its_own_two_batches(kind: str) -> None:
    generator, critic, of_generator, of_critic, losses = adversaries(kind, True)
    play(generator, critic, of_generator, of_critic, losses, "early", 1)
    assert of_generator.steps == of_critic.steps == 1
    # The critic saw 8 real and 8 forged samples in two passes, the generator's pass came after its step.
    assert of_critic._collector.passes == 1
    assert of_critic._collector.total == 8
    of_critic.zero_grad()
    assert of_critic._collector.total == 0


def test_two_optimizers_divide_one_model() -> None:
    whole, loss, x, t = problem()
    train(whole, loss, qd.QDOP(whole, loss, lr=0.05), x, t, 3)
    model, loss, x, t = problem()
    first = qd.QDOP(model, loss, lr=0.05, params=model[0].parameters())
    second = qd.QDOP(model, loss, lr=0.05, params=model[2].parameters())
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        loss(model(x), t).backward()
        first.step()
        second.step()
    assert_same(values(whole), values(model))
    first.close()
    train(model, loss, second, x, t)


def test_two_models_with_one_criterion_do_not_mix() -> None:
    loss = qd.Categorical()
    alone, _, x, t = problem()
    train(alone, loss, qd.QDNat(alone, loss, lr=0.05), x, t, 3)
    (one, _, x, t), (two, _, y, u) = problem(), problem(seed=1)
    first, second = qd.QDNat(one, loss, lr=0.05), qd.QDNat(two, loss, lr=0.05)
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        a, b = loss(one(x), t), loss(two(y), u)
        b.backward()
        a.backward()
        second.step()
        first.step()
    assert_same(values(alone), values(one))


def test_beside_adam() -> None:
    model, loss, x, t = problem()
    before = values(model)
    geometric = qd.QDOP(model, loss, lr=0.05, params=model[0].parameters())
    adam = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    for _ in range(2):
        geometric.zero_grad()
        adam.zero_grad()
        loss(model(x), t).backward()
        geometric.step()
        adam.step()
    assert_moved(before[:2], model[0])
    assert_moved(before[2:], model[2])
    assert list(geometric.state) and all(p is not model[2].weight for p in geometric.state)


def test_a_second_loss_that_is_not_the_criterion_s_does_not_enter_the_metric() -> None:
    model, loss, x, t = problem()

    def penalty() -> Tensor:
        return sum((p**2).sum() for p in model.parameters())

    kept = []
    for weight in (0.0, 0.1):
        optimizer = qd.QDOP(model, loss, lr=0.0)
        (loss(model(x), t) + weight * penalty()).backward()
        optimizer.step()
        kept.append(metric(optimizer))
        optimizer.close()
        model.zero_grad()
    assert_same(*kept)
