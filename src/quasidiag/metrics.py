"""The four metrics. One idea, four choices of the vectors that are backpropagated from the output.

==================  =========================================================================================
outer product       the loss derivative at the real target, free from the ordinary backward pass
Monte Carlo         the loss derivative at targets drawn from the model's own distribution
exact               vectors whose outer products sum to the Fisher matrix of the output
backpropagated      none: the diagonal Fisher matrix of the output, carried back through squared weights
==================  =========================================================================================

Nothing here knows of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from quasidiag.outputs import OutputModel

Metric = Literal["outer-product", "monte-carlo", "exact", "backpropagated"]
METRICS: tuple[str, ...] = get_args(Metric)


@torch.no_grad()
def cotangents(
    metric: str,
    criterion: OutputModel,
    output: Tensor,
    target: Tensor,
    samples: int = 1,
    generator: Generator | None = None,
) -> Iterator[Tensor]:
    r"""The vectors at the output whose backpropagated squares sum to the metric's weights :math:`w = \sum_k δ_k^2`.

    Each is a derivative of single samples' losses (not of the mean). They are made one at a time.
    """
    output = output.detach()
    if output.dtype in (torch.float16, torch.bfloat16):
        output = output.float()
    vectors: Iterable[Tensor]
    if metric == "outer-product":
        vectors = [criterion.residual(output, target)]
    elif metric == "monte-carlo":
        draws = (criterion.sample(output, generator) for _ in range(samples))
        vectors = (criterion.score(output, draw) for draw in draws)
        vectors = vectors if samples == 1 else (vector / samples**0.5 for vector in vectors)
    elif metric == "exact":
        vectors = criterion.each_vector(output)
    else:
        raise ValueError(f"the {metric} metric has no vectors at the output")
    counted = criterion.counted(output, target)
    # In place where the vectors are new tensors.
    fill = Tensor.masked_fill_ if metric == "monte-carlo" else Tensor.masked_fill
    for vector in vectors:
        yield vector if counted is None else fill(vector, ~counted, 0.0)
