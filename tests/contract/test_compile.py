"""``torch.compile``: of the model, before and after the optimizer is made, of the update, and of the paper's routines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import METRICS, assert_moved, assert_same, metric, problem, train, values
from torch import nn

import quasidiag as qd
from quasidiag import reductions

#: Traces forward and backward as every backend does, and needs no compiler of C++.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def frames() -> int:
    """How many functions were looked at, to be compiled between the breaks."""
    return torch._dynamo.utils.counters["frames"]["total"]


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
    before, compiled_before = values(model), frames()
    train(compiled, loss, optimizer, x, t, 3)
    assert frames() > compiled_before
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


def test_a_compiled_update_is_not_compiled_again() -> None:
    """Whatever a scheduler does to the rate, and however large the minibatch is."""
    ends = []
    for compiled in (False, True):
        model, loss, x, t = problem()
        optimizer = qd.QDOP(model, loss, lr=0.05, momentum=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = torch.compile(optimizer.step, backend=BACKEND) if compiled else optimizer.step
        with torch._dynamo.config.patch(error_on_recompile=True):
            for n in (24, 24, 16, 8):
                optimizer.zero_grad()
                loss(model(x[:n]), t[:n]).backward()
                step()
                schedule.step()
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("options", [{"lr": 0.05}, {"metric": "exact"}], ids=str)
def test_a_whole_step_compiled(options: dict[str, Any]) -> None:
    """Forward, backward and update in one function: it is compiled up to its breaks, and gives the same."""
    ends = []
    for compiled in (False, True):
        model, loss, x, t = problem()
        optimizer = qd.Riemannian(model, loss, **options)

        def step(model=model, loss=loss, x=x, t=t, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model(x), t)
            value.backward()
            optimizer.step()
            return value

        run = torch.compile(step, backend=BACKEND) if compiled else step
        before = values(model)
        for _ in range(3):
            run()
        assert_moved(before, model)
        ends.append(values(model) + metric(optimizer))
    assert_same(*ends, 1e-9)


@pytest.mark.parametrize("kind", METRICS)
def test_nothing_of_the_hooks_is_compiled(kind: str) -> None:
    """Backward in a compiled function runs them there, where a compiler would stumble over their bookkeeping."""
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.05, metric=kind)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        seen.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    @torch.compile(backend=backend)
    def step() -> None:
        loss(model(x), t).backward()

    step()
    optimizer.step()
    ours = str(Path(qd.__file__).parent)
    own = [trace for trace in seen if ours in trace and "outputs.py" not in trace]
    assert not own, own[0]


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


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1


MOMENTS = positive(5), 0.1 * positive(5, 4, seed=1), positive(5, 4, seed=2)
GRADIENT = positive(5, seed=3), positive(5, 4, seed=4)
ROUTINES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "quasi-diagonal": (reductions.quasi_diagonal, (*MOMENTS, *GRADIENT)),
    "quasi-diagonal, shifted": (
        partial(reductions.quasi_diagonal, shift=positive(4, seed=5), eps=1e-3, floor=0.0),
        (*MOMENTS, *GRADIENT),
    ),
    "safeguards": (reductions.safeguarded, (*MOMENTS, 0.1, 0.01, 0.1)),
    "diagonal": (reductions.diagonal, (MOMENTS[2], GRADIENT[1])),
    "unitwise": (reductions.unitwise, (torch.diag_embed(MOMENTS[2]) + 0.05, GRADIENT[1])),
}


@pytest.mark.parametrize("name", ROUTINES)
def test_every_reduction_compiles_without_a_break(name: str) -> None:
    routine, given = ROUTINES[name]
    found = torch.compile(routine, backend=BACKEND, fullgraph=True)(*given)
    torch.testing.assert_close(found, routine(*given), rtol=1e-13, atol=1e-13)


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


def test_a_model_can_be_exported_while_an_optimizer_watches_it() -> None:
    model = nn.Sequential(nn.Linear(20, 5))
    optimizer = qd.Riemannian(model, qd.Gaussian())
    x = torch.randn(4, 20)
    exported = torch.export.export(model.eval(), (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), model(x))
    optimizer.close()
