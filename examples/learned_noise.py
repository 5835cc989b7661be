"""Regression in which the noise of every output is learned together with the network.

From the upper half of a digit, predict its lower half. Some of the 32 pixels are nearly certain (the corners are always
blank), others are anyone's guess. A squared error weighs them all alike; the likelihood weighs each by its own σ.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import quasidiag as qd


def main(epochs: int = 20, digits: int = 1797) -> list[float]:
    """Train on scikit-learn's digits; return the negative log-likelihood of every epoch."""
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)[:digits]
    x, y = images[:, :32], images[:, 32:]

    model = nn.Sequential(nn.Linear(32, 100), nn.Tanh(), nn.Linear(100, 32))
    criterion = qd.LearnedGaussian(32, min_std=1 / 16)  # grey levels are multiples of 1/16
    optimizer = qd.QDMCNat(model, criterion, lr=1e-2, metric_start=100)

    losses = []
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            loss = criterion(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(x))
        if epoch % 5 == 4 or epoch == epochs - 1:
            print(f"epoch {epoch + 1:2}: {losses[-1]:6.2f} nats an image")

    print("σ of each pixel of the lower half, learned:")
    for row in criterion.std.detach().view(4, 8):
        print("  " + "  ".join(f"{value:.2f}" for value in row))
    return losses


if __name__ == "__main__":
    main()
