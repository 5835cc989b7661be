r"""Natural Langevin dynamics: Riemannian steps with noise shaped by the metric, which sample the Bayesian posterior.

Marceau-Caron & Ollivier, *Natural Langevin dynamics for neural networks* (2017, arXiv 1712.01076).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from quasidiag import root, together, validate
from quasidiag.blocks import DiagonalBlock, QuasiDiagonalBlock, State
from quasidiag.hidden import hidden
from quasidiag.moments import with_precision
from quasidiag.optimizer import Riemannian
from quasidiag.outputs import OutputModel
from quasidiag.sharding import is_sharded
from quasidiag.sums import dtype_of
from quasidiag.unitwise import UnitwiseBlock


class Langevin(Riemannian):
    r"""Riemannian gradient descent with noise, to sample parameters from the posterior instead of finding one estimate.

    With :math:`N` samples in the training set, a Gaussian prior of variance :math:`σ_0^2` and the mean negative
    log-likelihood :math:`ℓ`, each step is

    .. math::
        M &= M_\text{Fisher} + \tfrac{1}{N σ_0^2} I \\
        θ &← θ - η M^{-1} \Bigl(∇ℓ + \frac{θ}{N σ_0^2}\Bigr) + \sqrt{\frac{2 η T}{N}}\, M^{-1/2} ξ

    with standard normal :math:`ξ`. For a small :math:`η`, parameters along the way are samples of the posterior; average
    the predictions that they make (:class:`quasidiag.Posterior`). The prior's precision is also what keeps the metric
    away from zero. As in the paper, the derivative of the metric is neglected, which a metric that changes slowly (a
    small ``gamma``) justifies.

    Args:
        model: the model, as for :class:`Riemannian`.
        criterion: an output model. Without one your loss must be the mean negative log-likelihood.
        lr: the step size :math:`η`. The gradient noise of minibatches of size :math:`B` stays small beside the noise that
            is added as long as :math:`η ≪ 2B/N`.
        data_size: :math:`N`, the number of terms in the mean loss over the whole training set.
        prior: the prior's standard deviation :math:`σ_0`. For a unit's weights it is :math:`σ_0/\sqrt{\text{inputs}}`, so
            that it means the same in narrow and wide layers (a lookup table has one input at a time). A param group may have
            its own.
        temperature: :math:`T`; below 1 the posterior is sharpened, at 0 there is no noise.
        options: those of :class:`Riemannian` with an ``lr``, except ``momentum``, ``weight_decay``, ``maximize``, ``eps``,
            ``floor`` and ``capturable``. ``metric`` defaults to ``"monte-carlo"``, without criterion to ``"outer-product"``.
    """

    _fused = False

    def __init__(
        self,
        model: nn.Module,
        criterion: OutputModel | None = None,
        *,
        lr: float | Tensor | None = None,
        data_size: int | None = None,
        prior: float = 3.0,
        temperature: float = 1.0,
        **options: Any,
    ) -> None:
        if lr is None or options.pop("step", "fixed") != "fixed":
            raise ValueError("Langevin's noise is scaled by its step: give an lr, and no step=")
        if data_size is None:
            raise ValueError(
                "Langevin needs data_size, the number of samples in the training set: it says how narrow the "
                "posterior is"
            )
        for name in ("eps", "floor"):
            if name in options:
                raise ValueError(f"in Langevin the prior takes the place of {name}: leave it out")
        if options.get("capturable"):
            raise ValueError("Langevin draws its noise anew each step: it has no capturable")
        validate.whole("data_size", data_size)
        validate.number("temperature", temperature)
        self.data_size, self.temperature, self.prior = data_size, float(temperature), prior
        options.setdefault("metric", "outer-product" if criterion is None else "monte-carlo")
        super().__init__(model, criterion, lr=lr, **options)

    @hidden
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in :class:`Riemannian`; the group may have a ``prior``."""
        group = {"prior": self.prior, **param_group}
        _check({**self.defaults, **group})
        super().add_param_group(group)

    def precondition_(self) -> None:
        raise TypeError("Langevin's noise is scaled by its own lr: use step(), or Riemannian")

    def _find(self) -> None:
        super()._find()
        if any(map(is_sharded, self._group)):
            raise ValueError("Langevin does not cover sharded parameters (fully_shard)")
        self._inputs = {  # of which a lookup table has one at a time
            block.weight: block.adapter.rows(block.module, block.weight).shape[1]
            for block in self._blocks
            if block.weight is not None and block.adapter.full
        }

    def _precision(self, parameter: Tensor) -> float:
        r"""The prior's precision over *N*: :math:`1/(N σ_0^2)`, times the number of a unit's inputs for its weights."""
        inputs = self._inputs.get(parameter, 1)  # type: ignore[call-overload]
        return inputs / (self.data_size * self._group[parameter]["prior"] ** 2)

    def _gradient(self, parameter: Tensor) -> Tensor:
        """The gradient of the mean loss plus 1/N of that of the prior's negative logarithm."""
        return super()._gradient(parameter).add(parameter, alpha=self._precision(parameter))

    def _directions(
        self,
        batches: dict[DiagonalBlock, list[DiagonalBlock]] | None = None,
        without: Collection[DiagonalBlock] = (),
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        r""":math:`M^{-1} v - \sqrt{2T/(ηN)}\, M^{-1/2} ξ`, which the step multiplies by :math:`-η`."""
        for group in self.param_groups:
            _check(group)
        noise = _Noise(self.seed, self.steps)
        for block in filter(self._known, self._blocks):
            moving = [p for p in block.parameters if p.grad is not None]
            rates = {float(self._group[p]["lr"]) for p in block.parameters}
            whole = len(moving) == len(block.parameters) and len(rates) == 1
            if whole and isinstance(block, (QuasiDiagonalBlock, UnitwiseBlock)):
                yield from zip(block.parameters, self._in_block(block, noise))
                continue
            if moving:
                diagonal = block._bounded(block.moments(self.state))
                metric = dict(zip(block.parameters, diagonal))
                yield from ((p, self._alone(p, metric[p], noise)) for p in moving)
        fishers = {} if self.criterion is None else self.criterion.parameter_fisher()
        for p, fisher in fishers.items():
            if p in self._group and p.grad is not None:
                yield p, self._alone(p, fisher, noise)
        for p in self._others:
            if p.grad is not None:
                state, gamma = self.state[p], self._group[p]["gamma"]
                together.diagonal_rule([state], [self._gradient(p)], gamma, 0.0, batch=False)
                yield p, self._alone(p, state["square"].sqrt(), noise)

    def _in_block(self, block: QuasiDiagonalBlock | UnitwiseBlock, noise: _Noise) -> list[Tensor]:
        """Gradient step and noise together, in the coordinates in which the metric is the identity matrix."""
        dtype = dtype_of(block, self.state)
        v = block.rows_of([self._gradient(p).to(dtype) for p in block.parameters])
        half = root_of(block, self.state, [self._precision(p) for p in block.parameters])
        u = half.gradient(v)
        return block.like(half.step(u - self._strength(block.home) * noise(u)))

    def _alone(self, parameter: nn.Parameter, metric: Tensor, noise: _Noise) -> Tensor:
        v = self._gradient(parameter)
        m = metric.to(v.dtype) + self._precision(parameter)
        return v / m - self._strength(parameter) * noise(v) / m.sqrt()

    def _strength(self, parameter: Tensor) -> float:
        lr = float(self._group[parameter]["lr"])
        return math.sqrt(2 * self.temperature / (lr * self.data_size)) if lr else 0.0


class _Noise:
    """Standard normal numbers, determined by seed and step: no generator need be saved, and all ranks draw the same."""

    def __init__(self, seed: int, step: int) -> None:
        self._place = f"noise {seed} {step}"
        self._generators: dict[torch.device, Generator] = {}

    def __call__(self, like: Tensor) -> Tensor:
        device = like.device
        if device not in self._generators:
            # Hashed, because a CPU generator takes only 32 bits of its seed.
            place = f"{self._place} {len(self._generators)}".encode()
            seed = int.from_bytes(blake2b(place, digest_size=8).digest(), "little")
            self._generators[device] = Generator(device).manual_seed(seed)
        generator = self._generators[device]
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)


class Cholesky(NamedTuple):
    r"""As :class:`quasidiag.root.Root`, for full blocks: :math:`M = L L^⊤`, so that :math:`A = L^⊤`."""

    lower: Tensor
    bias: bool

    def gradient(self, v: list[Tensor]) -> Tensor:
        r""":math:`L^{-1} v`."""
        joined = torch.cat([*(x.unsqueeze(1) for x in v[:-1]), v[-1]], dim=1).unsqueeze(-1)
        return torch.linalg.solve_triangular(self.lower, joined, upper=False).squeeze(-1)

    def step(self, u: Tensor) -> list[Tensor]:
        r""":math:`L^{-⊤} u`."""
        w = torch.linalg.solve_triangular(self.lower.mT, u.unsqueeze(-1), upper=True).squeeze(-1)
        return [w[:, 0], w[:, 1:]] if self.bias else [w]


def root_of(
    block: QuasiDiagonalBlock | UnitwiseBlock, state: State, prior: list[float]
) -> root.Root | Cholesky:
    """The root of a block's metric with the precisions ``prior`` (of bias and weights) added to its diagonal."""
    if isinstance(block, UnitwiseBlock):
        full = block._guarded(state).clone()
        diagonal = full.diagonal(dim1=1, dim2=2)
        diagonal.add_(prior[-1])
        if block.bias is not None:
            diagonal[:, 0].add_(prior[0] - prior[-1])
        return Cholesky(torch.linalg.cholesky(full), block.bias is not None)
    c = block._shift(state)
    return root.quasi_diagonal(*with_precision(*block._moment_rows(state), c, *prior), c)


def _check(group: dict[str, Any]) -> None:
    """Raise if a param group has an option that would change the distribution that is sampled."""
    for name in ("momentum", "weight_decay", "maximize"):
        if group[name]:
            raise ValueError(
                f"Langevin samples the posterior of its prior, and {name} would make that another one: leave it out"
            )
    validate.number("prior", group["prior"])
    if not group["prior"]:
        raise ValueError("prior must be positive: it is a standard deviation")
