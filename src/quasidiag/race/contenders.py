"""The contenders of the race: ours with its defaults only, and peers at the best of several step sizes.

Weight decay is off everywhere, because training losses are compared. Every option that is not set here is the
optimizer's own default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import quasidiag as qd

Make = Callable[..., Optimizer]

OURS = "Riemannian"


@dataclass(frozen=True)
class Contender:
    """The search for its step size begins at ``exponents`` of ten; ``graph``: a step can be captured as a CUDA graph."""

    make: Make
    exponents: tuple[int, ...]
    graph: bool = False
    package: str | None = None

    @property
    def installed(self) -> bool:
        if self.package is None:
            return True
        return find_spec(self.package) is not None


class Together(Optimizer):
    """Several optimizers, each with its own parameters, combined into one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = [part for part in parts if part.param_groups]
        super().__init__([p for part in self.parts for p in _parameters(part)], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"]):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class Muon32(torch.optim.Muon):
    """Muon with its iteration in float32, because bfloat16 products are slow on most CPUs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            a, b, c = group["ns_coefficients"]
            for p in (p for p in group["params"] if p.grad is not None):
                state, g = self.state[p], p.grad
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(g))
                buffer.lerp_(g, 1 - group["momentum"])
                x = g.lerp(buffer, group["momentum"])
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / x.norm().clamp(min=group["eps"])
                for _ in range(group["ns_steps"]):
                    gram = x @ x.T
                    x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
                longer = max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(x.T if tall else x, alpha=-group["lr"] * longer)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _all(model: nn.Module, criterion: nn.Module) -> list[nn.Parameter]:
    return [*model.parameters(), *criterion.parameters()]


def _riemannian(
    model: nn.Module, criterion: qd.OutputModel, lr: float, device: str, **options: float
) -> Optimizer:
    optimizer = qd.Riemannian(model, criterion, **options)  # type: ignore[arg-type]
    for group in optimizer.param_groups:  # a factor on the step: 1, except in robustness runs
        group["lr"] = lr
    return optimizer


def _adamw(model: nn.Module, criterion: qd.OutputModel, lr: float, device: str) -> Optimizer:
    return _adamw_of(_all(model, criterion), lr, device)


def _adamw_of(parameters: list[nn.Parameter], lr: float, device: str) -> Optimizer:
    return torch.optim.AdamW(
        parameters, lr=lr, weight_decay=0.0, fused=True, capturable=device != "cpu"
    )


def _sgd(model: nn.Module, criterion: qd.OutputModel, lr: float, device: str) -> Optimizer:
    return torch.optim.SGD(_all(model, criterion), lr=lr, momentum=0.9, fused=True)


def _muon(model: nn.Module, criterion: qd.OutputModel, lr: float, device: str) -> Optimizer:
    """Muon on the matrices; AdamW at the same step size on the rest, including embeddings."""
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and p not in tables]
    own = {id(p) for p in matrices}
    rest = [p for p in _all(model, criterion) if id(p) not in own]
    kind = torch.optim.Muon if device != "cpu" else Muon32
    muon = kind(matrices, lr=lr, weight_decay=0.0)
    return Together([muon, _adamw_of(rest, lr, device)])


def _packaged(name: str, **options: Any) -> Make:
    def make(model: nn.Module, criterion: qd.OutputModel, lr: float, device: str) -> Optimizer:
        import pytorch_optimizer

        optimizer = getattr(pytorch_optimizer, name)
        made: Optimizer = optimizer(_all(model, criterion), lr=lr, weight_decay=0.0, **options)
        return made

    return make


def _singd(kfac_like: bool) -> Make:
    """SINGD (or K-FAC) on dense and convolutional layers; AdamW at its default step size on the rest."""

    def make(model: nn.Module, criterion: qd.OutputModel, lr: float, device: str) -> Optimizer:
        from singd.optim.optimizer import SINGD

        layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        own = {p for layer in layers for p in layer.parameters()}
        rest = [p for p in _all(model, criterion) if p not in own]
        sequence = any(isinstance(m, nn.Embedding) for m in model.modules())
        part: Optimizer = SINGD(
            model,
            [p for p in model.parameters() if p in own],
            lr=lr,
            kfac_like=kfac_like,
            alpha1=0.0 if kfac_like else 0.5,
            loss_average="batch+sequence" if sequence else "batch",
            warn_unsupported=False,
        )
        return Together([part, _adamw_of(rest, 1e-3, device)]) if rest else part

    return make


#: Ours first, then the most informative peers: runs are done in this order.
CONTENDERS: dict[str, Contender] = {
    OURS: Contender(_riemannian, (0,)),
    "AdamW": Contender(_adamw, (-4, -3, -2), graph=True),
    "Muon": Contender(_muon, (-3, -2, -1), graph=True),
    "SGD": Contender(_sgd, (-3, -2, -1), graph=True),
    "SOAP": Contender(_packaged("SOAP"), (-3, -2), package="pytorch_optimizer"),
    "PSGD-Kron": Contender(_packaged("Kron"), (-3, -2), package="pytorch_optimizer"),
    "Shampoo": Contender(
        # The package's plain Shampoo mixes its last step into the gradient in the place of momentum. This one's steps are
        # as long as RMSProp's (3): with SGD's length, its default, it was worse.
        _packaged("ScalableShampoo", preconditioning_compute_steps=10, graft_type=3),
        (-4, -3),
        package="pytorch_optimizer",
    ),
    "SINGD": Contender(_singd(False), (-3, -2), package="singd"),
    "K-FAC": Contender(_singd(True), (-3, -2), package="singd"),
}


def installed() -> tuple[str, ...]:
    """The contenders whose packages are installed."""
    return tuple(name for name, contender in CONTENDERS.items() if contender.installed)
