"""Models that are trained by several threads at once do not disturb each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import quasidiag as qd

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
