"""The least a step can cost: multiplications and bytes, counted.

Multiplications are those of the dense products. With :math:`F = \\sum N·in·out` over the layers and :math:`B` the same
without the layers whose input needs no gradient, a plain step makes ``F`` forward, ``F`` for the weights' gradients and
``B`` for the inputs'. A metric adds one product of size ``F`` per number kept for each weight, and the backward passes
below, each of size ``B``, as they compute no gradients of weights:

=============  ==========================  ====================
metric         backward passes             numbers kept
=============  ==========================  ====================
outer product  0                           1 (D), 2 (QD)
Monte Carlo    1                           1 (D), 2 (QD)
exact          K - 1, the rank of softmax  1 (D), 2 (QD)
=============  ==========================  ====================

Bytes are those of the update alone, each number read and written once: SGD reads the gradient and the parameter and
writes the parameter; a metric reads and writes its moments once more to average them and reads them to solve.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from quasidiag.bench.workloads import Workload


class Floor(NamedTuple):
    """The counted work of one step."""

    multiplications: float
    bytes: float

    def ms(self, per_ms: tuple[float, float]) -> float:
        """Milliseconds at the measured rates ``per_ms`` of multiplications in a product and of bytes in a copy."""
        return self.multiplications / per_ms[0] + self.bytes / per_ms[1]


def step(workload: Workload) -> Floor:
    """The floor of a step with SGD: all products that the network makes, including those of attention."""
    model = workload.copy()
    with FlopCounterMode(display=False) as counter:
        with workload.precision():
            output = model(workload.x)
        nn.functional.cross_entropy(
            output.flatten(0, -2).float(), workload.target.flatten()
        ).backward()
    size = sum(p.numel() for p in model.parameters())
    return Floor(counter.get_total_flops() / 2, 12.0 * size)


def metric(
    workload: Workload, kept: int, vectors: int, samples: float = 1.0, steps: float = 1.0
) -> Floor:
    """What a metric adds that keeps ``kept`` numbers per weight and makes ``vectors`` backward passes.

    ``samples`` and ``steps`` are the shares of these on which the metric is taken.
    """
    forward = backward = 0
    for module, seen, needs in _dense(workload):
        size = seen * module.weight.numel()
        forward += size
        backward += size if needs else 0
    size = sum(p.numel() for p in workload.model.parameters())
    work = samples * steps * (kept * forward + vectors * backward)
    return Floor(work, 4.0 * size * kept * (1 + 2 * steps))


def _dense(workload: Workload) -> list[tuple[nn.Linear, int, bool]]:
    """Each dense layer, how many samples it sees, and whether its input needs a gradient."""
    seen: list[tuple[nn.Linear, int, bool]] = []
    model = workload.copy()

    def look(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        assert isinstance(module, nn.Linear)
        seen.append((module, args[0].numel() // args[0].shape[-1], args[0].requires_grad))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
    with workload.precision():
        model(workload.x)
    return seen


#: For each algorithm, numbers kept per weight and backward passes; None stands for K - 1 passes with K classes.
COSTS: dict[str, tuple[int, int | None]] = {
    "DOP": (1, 0),
    "QDOP": (2, 0),
    "DMCNat": (1, 1),
    "QDMCNat": (2, 1),
    "DNat": (1, None),
    "QDNat": (2, None),
}


def of(name: str, workload: Workload, classes: int) -> Floor | None:
    """The floor of the contender ``name``; None where it is not known."""
    base = step(workload)
    algorithm, _, share = name.partition(", metric ")
    if algorithm == "SGD":
        return base
    if algorithm not in COSTS:
        return None
    kept, vectors = COSTS[algorithm]
    part = 1 / float(share.split("/")[-1].split()[-1]) if share else 1.0
    samples, steps = (part, 1.0) if share.startswith("on ") else (1.0, part)
    extra = metric(workload, kept, classes - 1 if vectors is None else vectors, samples, steps)
    return Floor(*(x + y for x, y in zip(base, extra)))
