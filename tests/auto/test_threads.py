"""Models that are trained by several threads at once do not disturb each other."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import quasidiag as qd
from quasidiag.auto import rerun

STEPS = 40


def trained(_: int = 0) -> tuple[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    x = torch.randn(100, 64, generator=generator)
    t = torch.randint(10, (100,), generator=generator)
    optimizer = qd.Riemannian(model, criterion := qd.Categorical(), step_every=1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        criterion(model(x), t).backward()
        optimizer.step()
    assert optimizer._model is not None
    return optimizer._model.replay.rerun.mode, [p.detach() for p in model.parameters()]


def test_threads_train_as_one_does() -> None:
    """Torch has one level of forward mode for all of them."""
    _, expected = trained()
    with ThreadPoolExecutor(4) as threads:
        for mode, found in threads.map(trained, range(8)):
            assert mode == "fast"
            for p, q in zip(found, expected, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


class Nested(nn.Module):
    """Trains another model in each of its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        inner = nn.Linear(8, 3)
        with torch.enable_grad():
            optimizer = qd.Riemannian(inner, criterion := qd.Categorical())
            criterion(inner(x.detach()), torch.arange(len(x)) % 3).backward()
            optimizer.step()
        return self.layer(x) + 0.01 * inner(x).detach()


def test_a_model_that_trains_another_in_its_forward_pass() -> None:
    """Not even then does it wait for itself."""
    model, criterion = Nested(), qd.Categorical()
    optimizer = qd.Riemannian(model, criterion)
    x, t = torch.randn(64, 8), torch.arange(64) % 3
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = criterion(model(x), t)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_process_that_is_forked_while_a_thread_measures() -> None:
    """The child has no such thread, but would wait for it."""
    with ThreadPoolExecutor(1) as threads:
        release = threading.Event()
        held = threading.Event()

        def hold() -> None:
            with rerun.LEVEL:
                held.set()
                release.wait(60)

        threads.submit(hold)
        held.wait(60)
        child = multiprocessing.get_context("fork").Process(target=trained)
        child.start()
        child.join(60)
        release.set()
    assert child.exitcode == 0
