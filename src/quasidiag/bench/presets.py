"""What ``quasidiag bench`` can run: workloads, contenders, curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

import quasidiag as qd
from quasidiag.bench.contenders import (
    AMORTISED,
    AUTOMATIC,
    PAPER,
    TORCH,
    Make,
    ours,
    torch_optimizer,
)
from quasidiag.bench.workloads import Workload, digits, gpt, mlp

PAPERS_NET = (784, 800, 800, 10)


@dataclass(frozen=True)
class Race:
    """A workload and the contenders timed on it, ``repeat`` steps per turn, after ``first`` steps that are not timed."""

    workload: Callable[[], Workload]
    contenders: Mapping[str, Make]
    base: str = "SGD"
    repeat: int = 10
    rounds: int = 15
    title: str = ""
    first: int = 3


@dataclass(frozen=True)
class Curve:
    """The same contenders on workloads of growing size."""

    axis: str
    workloads: Mapping[int, Callable[[], Workload]]
    contenders: Mapping[str, Make]
    repeat: int = 2
    rounds: int = 5


@dataclass(frozen=True)
class Preset:
    """Everything that one call of the command measures."""

    device: str
    races: list[Race]
    curves: list[Curve] = field(default_factory=list)
    #: Rows and columns of the layer on which the update is timed alone.
    update: tuple[int, int] = (800, 784)
    #: Whether a race is run on digits.
    digits: bool = False


def _curves(device: str) -> list[Curve]:
    few = {name: PAPER[name] for name in ("SGD", "DOP", "QDOP", "QDMCNat", "QDNat")}
    return [
        Curve(
            "width",
            {n: partial(mlp, (784, n, n, 10), 500, device) for n in (200, 400, 800, 1600)},
            few,
        ),
        Curve(
            "depth",
            {n: partial(mlp, (784, *[400] * n, 10), 500, device) for n in (1, 2, 4, 8)},
            few,
        ),
        Curve(
            "batch",
            {n: partial(mlp, PAPERS_NET, n, device) for n in (125, 250, 500, 1000)},
            few,
        ),
        Curve(
            "classes",
            {n: partial(mlp, (784, 400, 400, n), 500, device) for n in (2, 5, 10, 20, 40)},
            few,
        ),
    ]


#: The contenders on large GPU workloads; QDOP takes its metric in full, every tenth step, or on a tenth of the samples.
_LARGE: dict[str, Make] = {
    "AdamW fused": TORCH["AdamW fused"],
    "SGD": torch_optimizer(torch.optim.SGD, lr=1e-4),
    "QDOP": ours(qd.QDOP),
    "QDOP, metric every 10": ours(qd.QDOP, metric_every=10),
    "QDOP, metric on 1/10": ours(qd.QDOP, metric_fraction=0.1),
}
_FUSED = {"AdamW fused": TORCH["AdamW fused"], **AUTOMATIC}

PRESETS: dict[str, Callable[..., Preset]] = {
    "cpu": lambda data_dir=None: Preset(
        "cpu",
        [
            Race(lambda: mlp(PAPERS_NET, 500), {**PAPER, **AMORTISED}),
            Race(
                lambda: digits(PAPERS_NET, 500, data_dir),
                {"SGD": PAPER["SGD"], **_FUSED},
                repeat=144,  # a multiple of the 18 and 16 steps after which its work comes round
                rounds=7,
                first=150,
            ),
        ],
        _curves("cpu"),
        digits=True,
    ),
    "h200": lambda data_dir=None: Preset(
        "cuda",
        [
            Race(
                lambda: mlp((4096,) * 9, 8192, "cuda", torch.nn.ReLU, autocast=torch.bfloat16),
                _LARGE,
                base="AdamW fused",
                rounds=5,
            ),
            Race(
                lambda: gpt(16, autocast=torch.bfloat16),
                _LARGE,
                base="AdamW fused",
                rounds=4,
            ),
            Race(
                lambda: mlp((4096,) * 9, 8192, "cuda", torch.nn.ReLU, autocast=torch.bfloat16),
                _FUSED,
                base="AdamW fused",
                repeat=36,
                rounds=5,
                title="without an lr",
                first=120,
            ),
            Race(
                lambda: gpt(16, text=True, autocast=torch.bfloat16),
                _FUSED,
                base="AdamW fused",
                repeat=36,
                rounds=5,
                title="without an lr",
                first=120,
            ),
            Race(
                lambda: mlp(PAPERS_NET, 500, "cuda", graph=True),
                {name: PAPER[name] for name in ("SGD", "DOP", "QDOP", "QDMCNat", "QDNat")},
                repeat=50,
                rounds=9,
            ),
            Race(
                lambda: mlp(PAPERS_NET, 500, "cuda"),
                {"SGD": PAPER["SGD"], **_FUSED},
                repeat=36,
                rounds=5,
                title="without a graph",
                first=120,
            ),
        ],
        update=(16384, 4096),
    ),
    "smoke": lambda data_dir=None: Preset(
        "cpu",
        [
            Race(
                lambda: mlp((20, 30, 30, 5), 40),
                {**PAPER, "QDOP, metric on 1/10": AMORTISED["QDOP, metric on 1/10"]},
                repeat=1,
                rounds=3,
            )
        ],
        [
            Curve(
                "width",
                {n: partial(mlp, (20, n, 5), 40) for n in (8, 16)},
                {name: PAPER[name] for name in ("SGD", "QDOP")},
                repeat=1,
                rounds=2,
            )
        ],
        update=(64, 64),
    ),
}
