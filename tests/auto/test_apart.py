"""The matrix of the metric between the directions that a step is made of."""

from __future__ import annotations

import torch
from torch import nn

from quasidiag.auto import QuadraticModel, Report


def test_what_parallel_directions_differ_by_has_a_length() -> None:
    """The last update's length is of an older metric; the matrix must not become singular by that."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    new = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    model = QuadraticModel.__new__(QuadraticModel)
    for length in (1e-3, 0.5, 14.0, 100.0):
        model.report = Report(length=length)
        for last in (new, -new, new + torch.tensor([0.1, 0.0, 0.0])):
            metric = model._metric([{p: new}, {p: last}], [{p: new}, None])
            scale = metric.diagonal().rsqrt()
            assert torch.linalg.eigvalsh(metric * scale * scale.unsqueeze(1))[0] > 0.04
