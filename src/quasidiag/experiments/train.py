"""One training run: an ordinary training loop, on data that stays on the device.

Nothing within an epoch waits for the device. Only the updates are timed, not the evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import quasidiag as qd

from . import algorithms, datasets, models
from .config import Config, UsageError
from .graph import GraphedStep, Step

#: Samples in one forward pass of the evaluation.
CHUNK = 5000
#: How many validation images of an autoencoder are kept, with their reconstructions.
PICTURES = 10


@dataclass(frozen=True)
class Split:
    """Inputs and targets on the device: for training, the part of them that is evaluated, and for validation."""

    train: tuple[Tensor, Tensor]
    evaluated: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    image: tuple[int, int] | None
    source: str


def split(config: Config, data_dir: str | None = None) -> Split:
    """The data of a run; cached, because successive runs often share it."""
    return _split(
        config.dataset,
        config.device,
        config.inverted,
        config.autoencoder,
        config.batch_size,
        config.train_size,
        config.valid_size,
        config.eval_size,
        data_dir,
    )


@lru_cache(maxsize=2)
def _split(
    dataset: str,
    device: str,
    inverted: bool,
    autoencoder: bool,
    batch_size: int,
    train_size: int | None,
    valid_size: int | None,
    eval_size: int | None,
    data_dir: str | None,
) -> Split:
    data = datasets.load(dataset, data_dir)
    border = data.train_size
    train = min(train_size or border, border) // batch_size * batch_size  # full minibatches only
    if not train:
        raise UsageError(f"{dataset} has no minibatch of {batch_size} in {train_size or border}")
    stop = border + valid_size if valid_size else len(data.inputs)
    x = torch.from_numpy(np.concatenate([data.inputs[:train], data.inputs[border:stop]])).to(device)
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    x = 1 - x if inverted else x
    if autoencoder:
        t = x
    elif data.labels is None:
        raise UsageError(f"{dataset} has no classes; set output=gaussian")
    else:
        labels = np.concatenate([data.labels[:train], data.labels[border:stop]])
        t = torch.from_numpy(labels.astype(np.int64)).to(device)
    seen = min(eval_size or train, train)
    return Split(
        (x[:train], t[:train]),
        (x[:seen], t[:seen]),
        (x[train:], t[train:]),
        data.image,
        data.source,
    )


class Trainer:
    """A run in progress: its data, network and optimizer, the epochs done and the seconds they took."""

    def __init__(self, config: Config, data_dir: str | None = None, graph: bool = True) -> None:
        self.config = config
        self.data = self._data(data_dir)
        width = self.data.train[0].shape[1]
        if width != config.layers[0]:
            raise UsageError(f"{config.dataset} has {width} inputs, the network {config.layers[0]}")
        torch.manual_seed(config.seed)  # dropout draws from the default generator
        model, criterion = self._network()
        self.model, self.criterion = model.to(config.device), criterion.to(config.device)
        self.optimizer = self._optimizer()
        self.epoch, self.seconds = 0, 0.0
        graphed = graph and config.device != "cpu"
        self.step: Step = GraphedStep(self._step, self.optimizer) if graphed else self._step

    def _data(self, data_dir: str | None) -> Split:
        return split(self.config, data_dir)

    def _network(self) -> tuple[nn.Module, qd.OutputModel]:
        return models.build(self.config)

    def _optimizer(self) -> Optimizer:
        return algorithms.make(self.config, self.model, self.criterion)

    def _minibatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The minibatches of an epoch, in the order of the file."""
        x, t = self.data.train
        size = self.config.batch_size
        for k in range(0, len(x), size):
            yield x[k : k + size], t[k : k + size]

    def _step(self, x: Tensor, t: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(x), t).backward()
        self.optimizer.step()
        self.criterion.project_()

    def train_epoch(self) -> None:
        """Train on every minibatch once; ``seconds`` grows by the time it took."""
        self.model.train()
        self._wait()
        start = time.perf_counter()
        for x, t in self._minibatches():
            self.step(x, t)
        self._wait()
        self.seconds += time.perf_counter() - start
        self.epoch += 1

    def _wait(self) -> None:
        if self.config.device != "cpu":
            torch.cuda.synchronize()

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """The metrics of this epoch; values that are not finite are None."""
        self.model.eval()
        line: dict[str, Any] = {"epoch": self.epoch, "seconds": self.seconds}
        for part, data in (("train", self.data.evaluated), ("valid", self.data.valid)):
            nll, error = self._means(data)
            line[f"{part}_nll"], line[f"{part}_error"] = _finite(nll), _finite(error)
            if self.config.autoencoder:
                line[f"{part}_mse"] = _finite(2 * error / data[0].shape[1])
        return line

    def _means(self, data: tuple[Tensor, Tensor]) -> list[float]:
        """Negative log-likelihood and error, averaged over samples."""
        x, t = data
        sums = torch.zeros(2, dtype=torch.float64, device=x.device)
        for k in range(0, len(x), CHUNK):
            sums += self._sums(x[k : k + CHUNK], t[k : k + CHUNK])
        means: list[float] = (sums / len(x)).tolist()
        return means

    def _sums(self, x: Tensor, t: Tensor) -> Tensor:
        """Negative log-likelihood and error, summed over samples."""
        y = self.model(x)
        nll = self.criterion(y, t) * len(x)
        wrong = (y - t).square().sum() / 2 if self.config.autoencoder else (y.argmax(1) != t).sum()
        return torch.stack([nll, wrong]).double()

    @torch.no_grad()
    def pictures(self) -> dict[str, np.ndarray] | None:
        """A few validation images and their reconstructions, as bytes; None unless this is an autoencoder of images."""
        if not self.config.autoencoder or self.data.image is None:
            return None
        self.model.eval()
        x = self.data.valid[0][:PICTURES]
        pair = {"original": x, "reconstruction": self.model(x)}
        shape = (-1, *self.data.image)
        return {
            key: (value.nan_to_num().clamp(0, 1) * 255).round().byte().reshape(shape).cpu().numpy()
            for key, value in pair.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, including all random states."""
        state = {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "criterion": self.criterion.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        if self.config.device != "cpu":
            state["random_device"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.epoch, self.seconds = state["epoch"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.criterion.load_state_dict(state["criterion"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if self.config.device != "cpu":
            torch.cuda.set_rng_state(state["random_device"])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
