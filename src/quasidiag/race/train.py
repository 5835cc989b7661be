"""One run of the race: the experiments' training loop with shuffled minibatches, a schedule and other networks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import quasidiag as qd
from quasidiag.experiments import datasets, models, pool
from quasidiag.experiments.config import Config, UsageError
from quasidiag.experiments.graph import GraphedStep
from quasidiag.experiments.train import Split, Trainer

from . import networks
from .contenders import CONTENDERS
from .tasks import RaceConfig, find

#: The loss is measured after each of the first ``EVERY_ONE`` steps, then whenever the step number has grown by ``THEN``.
EVERY_ONE, THEN = 20, 1.1

#: Datasets are cached because a worker does runs of many tasks; there is room for all of them.
_load = lru_cache(maxsize=8)(datasets.load)


@lru_cache(maxsize=8)
def _on_device(dataset: str, device: str, data_dir: str | None) -> tuple[Tensor, Tensor | None]:
    """All inputs of a dataset, and its labels or None, on the device."""
    data = _load(dataset, data_dir)
    x = torch.from_numpy(data.inputs.copy()).to(device)
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    if data.labels is None:
        return x, None
    return x, torch.from_numpy(data.labels.astype(np.int64)).to(device)


def split(config: Config, data_dir: str | None) -> Split:
    """The data of a run: the authors' split, cut to full minibatches."""
    if config.dataset == "text":
        rows = networks.text().to(config.device)
        x, targets = rows[:, :-1], rows[:, 1:]
        border, image, source = len(rows) * 5 // 6, None, "source text of Python's standard library"
    else:
        data = _load(config.dataset, data_dir)
        x, labels = _on_device(config.dataset, config.device, data_dir)
        border, image, source = data.train_size, data.image, data.source
        if labels is None and not config.autoencoder:
            raise UsageError(f"{config.dataset} has no classes")
        targets = x if config.autoencoder or labels is None else labels
    train = min(config.train_size or border, border) // config.batch_size * config.batch_size
    if not train:
        raise UsageError(f"{config.dataset} has no minibatch of {config.batch_size}")
    stop = border + config.valid_size if config.valid_size else len(x)
    seen = min(config.eval_size or train, train)
    return Split(
        (x[:train], targets[:train]),
        (x[:seen], targets[:seen]),
        (x[border:stop], targets[border:stop]),
        image,
        source,
    )


class RaceTrainer(Trainer):
    """A run in progress, with shuffled minibatches, a schedule, and losses measured within epochs."""

    config: RaceConfig

    def __init__(self, config: Config, data_dir: str | None = None, graph: bool = True) -> None:
        self._within: list[list[float]] = []
        self._graph = graph and config.device != "cpu" and CONTENDERS[config.algorithm].graph
        super().__init__(config, data_dir, graph=False)

    def _data(self, data_dir: str | None) -> Split:
        return split(self.config, data_dir)

    def _network(self) -> tuple[nn.Module, qd.OutputModel]:
        if self.config.network == "convolutional":
            return networks.convolutional(), qd.Categorical()
        if self.config.network == "gpt":
            return networks.GPT(), qd.Categorical()
        return models.build(self.config)

    def _optimizer(self) -> Optimizer:
        given = self.model, self.criterion, self.config.lr, self.config.device
        made = CONTENDERS[self.config.algorithm].make(*given, **self.config.options)
        self._lrs = [group["lr"] for group in made.param_groups]
        return made

    def _minibatches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The minibatches of an epoch, shuffled by seed and epoch only, so that a resumed run has the same order."""
        x, t = self.data.train
        generator = torch.Generator().manual_seed(1000 * self.config.seed + self.epoch)
        order = torch.randperm(len(x), generator=generator).to(x.device)
        for chosen in order.split(self.config.batch_size):
            yield x[chosen], t[chosen]

    def train_epoch(self) -> None:
        """Train one epoch at its scheduled step size; a CUDA graph contains it, so a graph is captured for each new one."""
        factor = self.config.factor(self.epoch)
        for group, lr in zip(self.optimizer.param_groups, self._lrs):
            group["lr"] = lr * factor
        first = isinstance(self.step, GraphedStep)
        if self._graph and not (first and self.config.schedule == "constant"):
            self.step = GraphedStep(self._step, self.optimizer)
        length = len(self.data.train[0]) // self.config.batch_size
        self.model.train()
        self._wait()
        start = time.perf_counter()
        for number, (x, t) in enumerate(self._minibatches(), self.epoch * length + 1):
            self.step(x, t)
            if looked_at(number):
                self._wait()
                self.seconds += time.perf_counter() - start
                self._look(number / length)
                start = time.perf_counter()
        self._wait()
        self.seconds += time.perf_counter() - start
        self.epoch += 1

    @torch.no_grad()
    def _look(self, epoch: float) -> None:
        """Record the current training loss at ``epoch`` (a fraction); training is not affected."""
        self.model.eval()
        loss = self._means(self.data.evaluated)[
            find(self.config.experiment).select == "train_error"
        ]
        if math.isfinite(loss):
            self._within.append([round(epoch, 6), float(f"{loss:.6g}")])
        self.model.train()

    def evaluate(self) -> dict[str, Any]:
        """The metrics of this epoch; ``within`` has the training losses since the last evaluation, as ``[epoch, loss]``."""
        within, self._within = self._within, []
        return {**super().evaluate(), "within": within}

    def _sums(self, x: Tensor, t: Tensor) -> Tensor:
        if self.config.autoencoder:
            return super()._sums(x, t)
        y = self.model(x)
        wrong = (y.argmax(-1) != t).float().mean() * len(x)
        return torch.stack([self.criterion(y, t) * len(x), wrong]).double()

    def pictures(self) -> None:
        """The race keeps no pictures."""
        return None


def looked_at(step: int) -> bool:
    """Whether the loss is measured after ``step`` steps."""
    if step <= EVERY_ONE:
        return True
    before, now = (math.floor(math.log(n / EVERY_ONE, THEN)) for n in (step - 1, step))
    return now > before


def work(config: dict[str, Any], settings: pool.Settings) -> pool.Outcome:
    """Do one run of the race, in a worker."""
    return pool.work(config, settings, read=RaceConfig.from_dict, make=RaceTrainer)
