"""``torch.compile``: of the model, before and after the optimizer is made, of the update, and of the paper's routines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, problem, train, values
from torch import nn

import quasidiag as qd

#: Traces forward and backward as every backend does, and needs no compiler of C++.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("given", ["model", "compiled"])
@pytest.mark.parametrize("kind", METRICS)
def test_compiled_model(kind: str, given: str) -> None:
    plain, loss, x, t = problem()
    usual = qd.Riemannian(plain, loss, lr=0.05, metric=kind, seed=1)
    train(plain, loss, usual, x, t, 3)

    model, loss, x, t = problem()
    compiled = torch.compile(model, backend=BACKEND)
    optimizer = qd.Riemannian(
        model if given == "model" else compiled, loss, lr=0.05, metric=kind, seed=1
    )
    before, compiled_before = values(model), graphs()
    train(compiled, loss, optimizer, x, t, 3)
    assert graphs() > compiled_before
    assert_moved(before, model)
    assert_same(values(plain) + metric(usual), values(model) + metric(optimizer), 1e-10)


def test_compiled_model_without_a_criterion() -> None:
    loss = nn.CrossEntropyLoss()
    plain, _, x, t = problem()
    train(plain, loss, qd.QDOP(plain, lr=0.05), x, t, 3)
    model, _, x, t = problem()
    compiled = torch.compile(model, backend=BACKEND)
    train(compiled, loss, qd.QDOP(compiled, lr=0.05), x, t, 3)
    assert_same(values(plain), values(model), 1e-10)


def test_compiled_and_run_before_the_optimizer() -> None:
    model, loss, x, t = problem()
    compiled = torch.compile(model, backend=BACKEND)
    compiled(x)
    optimizer = qd.QDOP(model, loss, lr=0.05)
    before = values(model)
    loss(compiled(x), t).backward()
    with pytest.raises(RuntimeError, match=r"torch\.compiler\.reset"):
        optimizer.step()
    assert_same(before, values(model), 0.0)
    torch.compiler.reset()
    train(compiled, loss, optimizer, x, t)
    assert_moved(before, model)


def test_compiled_update() -> None:
    ends = []
    for compiled in (False, True):
        model, loss, x, t = problem()
        optimizer = qd.QDNat(model, loss, lr=0.05, momentum=0.5)
        step = torch.compile(optimizer.step, backend=BACKEND) if compiled else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(x), t).backward()
            step()
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends)


def test_compiled_loop() -> None:
    plain, loss, x, t = problem()
    train(plain, loss, qd.QDOP(plain, loss, lr=0.05), x, t, 2)
    model, loss, x, t = problem()
    optimizer = qd.QDOP(model, loss, lr=0.05)

    @torch.compile(backend=BACKEND)
    def forward() -> torch.Tensor:
        return loss(model(x), t)

    for _ in range(2):
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()
    assert_same(values(plain), values(model), 1e-10)


def test_the_paper_s_routines_compile_without_a_break() -> None:
    generator = torch.Generator().manual_seed(0)
    diagonal, v = (torch.rand(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    row = 0.1 * torch.rand(5, 3, generator=generator, dtype=torch.float64)
    solve = torch.compile(qd.qd_solve, backend=BACKEND, fullgraph=True)
    update = torch.compile(qd.qd_rank_one_update, backend=BACKEND, fullgraph=True)
    torch.testing.assert_close(solve(diagonal, row, v), qd.qd_solve(diagonal, row, v))
    for a, b in zip(
        update(diagonal, row, v, 0.1), qd.qd_rank_one_update(diagonal, row, v, 0.1), strict=True
    ):
        torch.testing.assert_close(a, b)
