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

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from quasidiag.outputs import OutputModel

Metric = Literal["outer-product", "monte-carlo", "exact", "backpropagated"]
METRICS: tuple[str, ...] = get_args(Metric)


#: Of a larger output, so many numbers at a time are drawn: a draw takes several times the memory of its part.
AT_ONCE = 2**26


@torch.no_grad()
def cotangents(
    metric: str,
    criterion: OutputModel,
    output: Tensor,
    target: Tensor,
    samples: int = 1,
    generator: Generator | None = None,
    boost: Tensor | None = None,
) -> Iterator[Tensor]:
    r"""The vectors at the output whose backpropagated squares sum to the metric's weights :math:`w = \sum_k δ_k^2`.

    Each is a derivative of single samples' losses (not of the mean), times ``boost``, in the dtype of the output. They are
    made one at a time.

    Those of the exact metric of a softmax are for all rows (samples, and positions of a sample) at once, with a random sign
    each: where rows depend on the same units, products of their derivatives then vanish on the average. Where they do not,
    signs change nothing.
    """
    output = output.detach()
    counted = criterion.counted(output, target)

    def brought(vector: Tensor, counted: Tensor | None = counted) -> Tensor:
        vector = vector if counted is None else vector.masked_fill(~counted, 0.0)
        return (vector if boost is None else vector * boost).to(output.dtype)

    def drawn(output: Tensor, counted: Tensor | None) -> Tensor:
        full = _full(output)
        vector = criterion.score(full, criterion.sample(full, generator))
        return brought(vector if samples == 1 else vector / samples**0.5, counted)

    if metric == "exact":
        full = _full(output)
        signs = _signs(full, generator) if criterion.classes(output) > 1 else None
        for vector in criterion.each_vector(full):
            yield brought(vector if signs is None else vector * signs)
    elif metric == "monte-carlo":
        for _ in range(samples):
            yield _in_parts(drawn, output, counted)
    else:
        raise ValueError(f"the {metric} metric has no vectors at the output")


def _signs(output: Tensor, generator: Generator | None) -> Tensor:
    """1 or -1 for each row of the output."""
    return torch.empty_like(output[..., :1]).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)


def _full(output: Tensor) -> Tensor:
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def _in_parts(
    call: Callable[[Tensor, Tensor | None], Tensor], output: Tensor, counted: Tensor | None
) -> Tensor:
    """``call(output, counted)``, of a large output for some rows after the others."""
    rows = AT_ONCE * len(output) // max(1, output.numel())
    if rows >= len(output):
        return call(output, counted)
    found, rows = torch.empty_like(output), max(1, rows)
    masks = repeat(None) if counted is None else counted.split(rows)
    for to, y, mask in zip(found.split(rows), output.split(rows), masks):
        to.copy_(call(y, mask))
    return found
