"""skorch and scikit-learn: the step size chosen by `GridSearchCV`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

import quasidiag as qd


class RiemannianClassifier(NeuralNetClassifier):
    """A skorch classifier whose optimizer gets the module and the criterion, not only the parameters."""

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> RiemannianClassifier:
        _, options = self.get_params_for_optimizer("optimizer", [])
        self.optimizer_ = self.optimizer(self.module_, self.criterion_, **options)
        return self


def network() -> nn.Sequential:
    """A dense classifier of 8×8 digits."""
    return nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))


def main(epochs: int = 10, digits: int = 1797) -> list[float]:
    """Search over the step size on scikit-learn's digits; return the best net's training loss of every epoch."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, t = (pixels[:digits] / 16).astype(np.float32), labels[:digits]

    net = RiemannianClassifier(
        network,
        criterion=qd.Categorical,
        optimizer=qd.QDOP,
        optimizer__metric_start=20,
        max_epochs=epochs,
        batch_size=50,
        train_split=None,
        verbose=0,
    )
    search = GridSearchCV(net, {"lr": [1e-4, 1e-3, 1e-2]}, cv=3, scoring="accuracy")
    search.fit(x, t)
    for lr, score in zip(search.cv_results_["param_lr"], search.cv_results_["mean_test_score"]):
        print(f"lr {lr:g}: accuracy {score:.1%}")
    print(f"best: {search.best_params_}")
    return search.best_estimator_.history[:, "train_loss"]


if __name__ == "__main__":
    main()
