"""Optimizers and curvature packages by others, as far as installed; each with its own defaults."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quasidiag.bench.contenders import TORCH, Make, Step, torch_optimizer
from quasidiag.bench.workloads import Workload


def installed() -> tuple[dict[str, Make], dict[str, str]]:
    """The peers that can be imported, and why the others cannot."""
    found, missing = dict(TORCH), {}
    for package, (names, make) in _PACKAGES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.update(make(importlib.import_module(package)))
        except (ImportError, AttributeError) as error:
            missing.update(dict.fromkeys(names, f"{package}: {error}"))
    return found, missing


def _torch(module: Any) -> dict[str, Make]:
    return {"Muon": lambda workload: Step(workload, lambda model, _: _Muon(module, model))}


class _Muon(Optimizer):
    """Muon on the matrices and AdamW on the rest, as its authors advise."""

    def __init__(self, module: Any, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        self._parts = [module.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-4)]
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def _pytorch_optimizer(module: Any) -> dict[str, Make]:
    return {
        "SOAP every 10": torch_optimizer(module.SOAP, lr=1e-4, precondition_frequency=10),
        "Shampoo every 10": torch_optimizer(
            module.ScalableShampoo, lr=1e-4, preconditioning_compute_steps=10
        ),
        "PSGD-Kron": torch_optimizer(module.Kron, lr=1e-4),
        "SophiaH every 10": lambda workload: _Sophia(
            workload, lambda model, _: module.SophiaH(model.parameters(), lr=1e-4, update_period=10)
        ),
    }


class _Sophia(Step):
    """SophiaH needs the graph of the gradient in those steps in which it takes a Hessian-vector product."""

    count = 0

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(self.workload.x), self.workload.target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle, which is broken below
            loss.backward(create_graph=self.count % 10 == 0)
        self.count += 1
        self.optimizer.step()
        for p in self.model.parameters():
            p.grad = None


def _singd(module: Any) -> dict[str, Make]:
    return {
        "singd every 10": lambda workload: Step(
            workload, lambda model, _: module.SINGD(model, lr=1e-4, T=10, warn_unsupported=False)
        )
    }


class _Preconditioned(Step):
    """A step of SGD whose gradient is first preconditioned with another package's curvature."""

    def __init__(self, workload: Workload, precondition: Callable[[_Preconditioned], None]) -> None:
        super().__init__(workload, lambda model, _: torch.optim.SGD(model.parameters(), lr=1e-4))
        self.precondition = precondition

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(self.workload.x), self.workload.target).backward()
        self.precondition(self)
        self.optimizer.step()


def _set_gradients(model: nn.Module, flat: Tensor) -> None:
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()


def _nngeometry(module: Any) -> dict[str, Make]:
    metrics = importlib.import_module("nngeometry.metrics")
    matrices = importlib.import_module("nngeometry.object")

    def make(fim: Callable[..., Any], **options: Any) -> Make:
        def precondition(step: _Preconditioned) -> None:
            data = torch.utils.data.TensorDataset(step.workload.x, step.workload.target)
            loader = torch.utils.data.DataLoader(data, batch_size=len(data))
            gradient = matrices.PVector.from_model_grad(step.model)
            fisher = fim(
                model=step.model,
                loader=loader,
                representation=matrices.PMatQuasiDiag,
                variant="classif_logits",
                **options,
            )
            solved = fisher.solve(gradient, 1e-4).to_torch()
            _set_gradients(step.model, solved)

        return lambda workload: _Preconditioned(workload, precondition)

    return {
        "nngeometry QD, Monte Carlo": make(metrics.FIM_MonteCarlo),
        "nngeometry QD, exact": make(metrics.FIM),
    }


def _backpack(module: Any) -> dict[str, Make]:
    extensions = importlib.import_module("backpack.extensions")

    class DiagonalGGN(Step):
        def __init__(self, workload: Workload, extension: Any, name: str) -> None:
            super().__init__(
                workload, lambda model, _: torch.optim.SGD(model.parameters(), lr=1e-4)
            )
            self.extension, self.name = extension, name
            self.model = module.extend(self.model)
            self.loss = module.extend(nn.CrossEntropyLoss())

        def __call__(self) -> None:
            self.optimizer.zero_grad()
            loss = self.loss(self.model(self.workload.x), self.workload.target)
            with module.backpack(self.extension):
                loss.backward()
            for p in self.model.parameters():
                assert isinstance(p.grad, Tensor)
                p.grad.div_(getattr(p, self.name) + 1e-4)
            self.optimizer.step()

    return {
        "BackPACK diagonal, Monte Carlo": lambda workload: DiagonalGGN(
            workload, extensions.DiagGGNMC(), "diag_ggn_mc"
        ),
        "BackPACK diagonal, exact": lambda workload: DiagonalGGN(
            workload, extensions.DiagGGNExact(), "diag_ggn_exact"
        ),
    }


def _curvlinops(module: Any) -> dict[str, Make]:
    def precondition(step: _Preconditioned) -> None:
        parameters = list(step.model.parameters())
        data = [(step.workload.x, step.workload.target)]
        kfac = module.KFACLinearOperator(
            step.model, nn.CrossEntropyLoss(), parameters, data, check_deterministic=False
        )
        inverse = module.KFACInverseLinearOperator(kfac, damping=1e-3)
        gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        _set_gradients(step.model, inverse @ gradient)

    return {"curvlinops K-FAC": lambda workload: _Preconditioned(workload, precondition)}


_PACKAGES: dict[str, tuple[list[str], Callable[[Any], dict[str, Make]]]] = {
    "torch.optim": (["Muon"], _torch),
    "pytorch_optimizer": (["SOAP", "Shampoo", "PSGD-Kron", "SophiaH"], _pytorch_optimizer),
    "singd.optim.optimizer": (["singd"], _singd),
    "nngeometry": (["nngeometry"], _nngeometry),
    "backpack": (["BackPACK"], _backpack),
    "curvlinops": (["curvlinops"], _curvlinops),
}
