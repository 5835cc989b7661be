r"""Output models: what the network's output says about the target.

Each is a criterion whose value is the mean negative log-likelihood :math:`ℓ = -\ln p(t | y)` over the batch. It also has
what the metrics need: a target drawn from the model (Monte Carlo), vectors whose outer products sum to the Fisher matrix
of the output (exact), that matrix's diagonal (backpropagated), and its quadratic form.

==================  =============================================  ======================================
model               Fisher matrix of the output                    vectors
==================  =============================================  ======================================
categorical         :math:`\mathrm{diag}(p) - p p^⊤` on logits     columns of its Cholesky factor
Gaussian            :math:`\mathrm{diag}(1/σ^2)`                   :math:`e_k/σ_k`
Bernoulli           :math:`\mathrm{diag}(y(1-y))` on logits        :math:`\sqrt{y_k(1-y_k)}\, e_k`
==================  =============================================  ======================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn


class OutputModel(nn.Module, ABC):
    """A criterion that is also a probability model of the target."""

    #: A lower bound on the criterion's value for all outputs and targets, below which no automatic step promises to go. A
    #: subclass whose values can be less than its parent's bound must set its own.
    least: float = -math.inf

    def least_of(self, output: Tensor) -> float:
        """The lower bound for outputs of this shape, with the constants of a density, computed in float64.

        It is what a step may promise to reach, if ``least`` is finite.
        """
        return self.least

    @abstractmethod
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean negative log-likelihood over the batch."""

    def terms(self, output: Tensor, target: Tensor) -> int | Tensor:
        """The number of terms that the mean is over: samples or, for sequences, their positions.

        For a part of the samples the value times this must be that part of the sum: of a weighted mean, it is the weights'.
        """
        return output.shape[0]

    def classes(self, output: Tensor) -> int:
        """The number of classes of a categorical target; 1 for other targets."""
        return 1

    def counted(self, output: Tensor, target: Tensor) -> Tensor | None:
        """A mask over the output, false for samples that do not count; ``None`` if all do."""
        return None

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Output and target from the arguments of :meth:`forward`, positional or by keyword."""
        if len(args) < 2:
            args = tuple(signature(self.forward).bind(*args, **kwargs).arguments.values())
        return args[0], args[1]

    @abstractmethod
    def residual(self, output: Tensor, target: Tensor) -> Tensor:
        """The derivative of each sample's negative log-likelihood with respect to the output, as a new tensor.

        Override it along with :meth:`forward`: the automatic step takes any other part of the gradient for another loss's.
        """

    def score(self, output: Tensor, draw: Tensor) -> Tensor:
        """:meth:`residual` at targets drawn by :meth:`sample`: its outer product is the Fisher matrix, on the average."""
        return self.residual(output, draw)

    @abstractmethod
    def sample(self, output: Tensor, generator: Generator | None = None) -> Tensor:
        """A target for each sample, drawn from the distribution that the output stands for."""

    @abstractmethod
    def vectors(self, output: Tensor) -> Tensor:
        """``[K, *output.shape]``: vectors whose outer products sum to the Fisher matrix of each sample's output.

        Of an output with several positions, ``[..., positions, classes]``, that of each position's output will do.
        """

    def each_vector(self, output: Tensor) -> Iterator[Tensor]:
        """The vectors of :meth:`vectors` one at a time, which takes less memory."""
        yield from self.vectors(output)

    @abstractmethod
    def fisher(self, output: Tensor) -> Tensor:
        """The diagonal of the Fisher matrix of each sample's output."""

    def inner(self, output: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """The quadratic form ‹u, F v› of the output's Fisher matrix, summed over the batch."""
        return (self.fisher(output) * u * v).sum()

    def parameter_fisher(self) -> dict[nn.Parameter, Tensor]:
        """The diagonal Fisher information of the criterion's own parameters, in closed form."""
        return {}

    def along(self, p: Tensor, step: Tensor) -> Tensor:
        """The change of the parameter ``p`` for ``step``, a part of its natural step: ``step`` itself, unless too long."""
        return step

    def project_(self) -> None:
        """Bring the criterion's own parameters back into their bounds, after a step."""


class Categorical(OutputModel):
    r"""Softmax over *K* classes: the output is logits ``[..., K]``, the target class numbers ``[...]``.

    The value is the mean of :math:`-\ln p_t` over all targets but those equal to ``ignore_index``. With ``label_smoothing``
    :math:`s`, it is that of :math:`-\sum_k q_k \ln p_k` with :math:`q = (1 - s)\, e_t + s/K`, as in ``nn.CrossEntropyLoss``.
    """

    least = 0.0
    label_smoothing = 0.0

    def __init__(self, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be in [0, 1], not {label_smoothing!r}")
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def least_of(self, output: Tensor) -> float:
        k, s = output.shape[-1], self.label_smoothing
        own, other = 1 - s + s / k, s / k
        entropy = -own * math.log(own) - (k - 1) * other * math.log(other) if s else 0.0
        return self.least + entropy

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self._check(output, target)
        k = output.shape[-1]
        return F.cross_entropy(
            output.reshape(-1, k),
            target.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def _check(self, output: Tensor, target: Tensor) -> None:
        if output.dim() < 2:
            raise ValueError(
                f"Categorical wants logits [..., classes], not shape {tuple(output.shape)}"
            )
        if target.shape == output.shape and target.is_floating_point():
            raise TypeError(
                "Categorical wants class numbers as target, not probabilities: target.argmax(-1), or for a mixture of two "
                "classes the sum of two calls, each with its weight"
            )
        if target.dtype != torch.int64:
            raise TypeError(
                f"Categorical wants class numbers (int64) as target, not {target.dtype}: target.long()"
            )
        if target.shape != output.shape[:-1]:
            raise ValueError(
                f"target of shape {tuple(target.shape)} does not fit logits {tuple(output.shape)}: classes are the last "
                f"dimension, so the target must have shape {tuple(output.shape[:-1])}"
            )
        _not_empty(output)
        if target.device.type == "cpu":
            least, most = target.aminmax()
            if least >= 0 and most < output.shape[-1]:
                return
            wrong = ((target < 0) | (target >= output.shape[-1])) & (target != self.ignore_index)
            if wrong.any():
                raise ValueError(
                    f"target holds class {int(target[wrong][0])}, outside 0..{output.shape[-1] - 1}"
                )

    def terms(self, output: Tensor, target: Tensor) -> int | Tensor:
        count = (target != self.ignore_index).sum()
        return int(count) if target.device.type == "cpu" else count

    def classes(self, output: Tensor) -> int:
        return output.shape[-1]

    def counted(self, output: Tensor, target: Tensor) -> Tensor | None:
        counted = (target != self.ignore_index).unsqueeze(-1)
        return None if target.device.type == "cpu" and bool(counted.all()) else counted

    def residual(self, output: Tensor, target: Tensor) -> Tensor:
        smoothing = self.label_smoothing
        derivative = self._residual(output, target, 1 - smoothing)
        return derivative.sub_(smoothing / output.shape[-1]) if smoothing else derivative

    def score(self, output: Tensor, draw: Tensor) -> Tensor:
        # Smoothing is of the targets: what the model itself would say is not smooth.
        if self.label_smoothing:
            return self._residual(output, draw, 1.0)
        return self.residual(output, draw)

    @staticmethod
    def _residual(output: Tensor, target: Tensor, weight: float) -> Tensor:
        """The probabilities, less ``weight`` for the target's class."""
        classes = target.clamp(0, output.shape[-1] - 1).unsqueeze(
            -1
        )  # what is ignored counts for nothing
        less = torch.full_like(classes, -weight, dtype=output.dtype)
        return output.softmax(-1).scatter_add_(-1, classes, less)

    def sample(self, output: Tensor, generator: Generator | None = None) -> Tensor:
        # As torch.multinomial draws: the class with the largest p/q, q exponential. But without its check of p, which waits
        # for the device and on CUDA ends the whole context if p is not finite. In place, as there may be many classes.
        q = torch.empty_like(output, memory_format=torch.contiguous_format)
        q.exponential_(generator=generator)
        return q.log_().neg_().add_(output).argmax(-1)

    def vectors(self, output: Tensor) -> Tensor:
        # The columns of the Cholesky factor, each class against those after it: one fewer than classes, which is the rank.
        if output.shape[-1] == 1:  # the Fisher matrix is zero
            return torch.zeros_like(output).unsqueeze(0)
        p, root, after = self._factors(output)
        vectors = (-p.unsqueeze(-2) / after.unsqueeze(-1)).triu(1)
        vectors.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return (root.unsqueeze(-1) * vectors).movedim(-2, 0)

    def each_vector(self, output: Tensor) -> Iterator[Tensor]:
        if output.shape[-1] == 1:
            yield from self.vectors(output)
        p, root, after = self._factors(output)
        part = (root / after).neg_()
        del after  # each of these is as large as the output
        for k in range(p.shape[-1] - 1):
            vector = p * part[..., k : k + 1]
            vector[..., :k] = 0.0
            vector[..., k] = root[..., k]
            yield vector

    @staticmethod
    def _factors(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The probabilities, the diagonal of the Cholesky factor, and the total probability of the classes after each."""
        p = output.softmax(-1)
        tails = p.flip(-1).cumsum(-1).flip(-1).clamp_min(torch.finfo(p.dtype).tiny)
        return p, (p[..., :-1] * tails[..., 1:] / tails[..., :-1]).sqrt(), tails[..., 1:]

    def fisher(self, output: Tensor) -> Tensor:
        p = output.softmax(-1)
        return p * (1 - p)

    def inner(self, output: Tensor, u: Tensor, v: Tensor) -> Tensor:
        p = output.softmax(-1)
        mean_u, mean_v = (p * u).sum(-1, keepdim=True), (p * v).sum(-1, keepdim=True)
        return (p * (u - mean_u) * (v - mean_v)).sum()


class _Elementwise(OutputModel):
    """Independent outputs: the Fisher matrix is diagonal, and there is one vector for each coordinate."""

    def vectors(self, output: Tensor) -> Tensor:
        flat = self.fisher(output).sqrt().expand_as(output).reshape(len(output), -1)
        return torch.diag_embed(flat).movedim(-2, 0).reshape(flat.shape[1], *output.shape)

    def each_vector(self, output: Tensor) -> Iterator[Tensor]:
        root = self.fisher(output).sqrt().expand_as(output).reshape(len(output), -1)
        for k in range(root.shape[1]):
            vector = torch.zeros_like(root)
            vector[:, k] = root[:, k]
            yield vector.view(output.shape)

    def _check(self, output: Tensor, target: Tensor) -> None:
        if target.shape != output.shape:
            raise ValueError(
                f"target of shape {tuple(target.shape)} does not fit the output {tuple(output.shape)}"
            )
        if not target.is_floating_point():
            raise TypeError(f"target must be a floating-point tensor, not {target.dtype}")
        _not_empty(output)


class Gaussian(_Elementwise):
    r"""Independent normal targets around the network's output, with given standard deviations ``std``.

    .. math:: ℓ = \sum_k \frac{(y_k - t_k)^2}{2σ_k^2} + \ln σ_k + \tfrac12 \ln 2π

    ``std`` is kept in float64, whatever the module is cast to, and rounded to the output's precision when it is used.
    """

    std: Tensor

    def __init__(self, std: float | Tensor = 1.0) -> None:
        super().__init__()
        std = torch.as_tensor(std, dtype=torch.float64)
        if not bool(((std > 0) & std.isfinite()).all()):
            raise ValueError(f"std must be positive and finite, not {std.tolist()}")
        self.register_buffer("std", std)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gaussian:
        """Move ``std`` to another device but keep its precision: digits once rounded off do not come back."""
        exact = self.std
        self.std = exact.float()
        super()._apply(fn, recurse)
        if self.std.device.type != "mps":  # which has no float64
            self.std = exact.to(self.std.device)
        return self

    def _check(self, output: Tensor, target: Tensor) -> None:
        super()._check(output, target)
        sizes, shape = self.std.shape, output.shape[1:]
        if len(sizes) > len(shape) or not all(
            a in (1, b) for a, b in zip(reversed(sizes), reversed(shape))
        ):
            raise ValueError(f"std of shape {tuple(sizes)} does not fit outputs of {tuple(shape)}")

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self._check(output, target)
        std = self.std.to(output.dtype)
        squares = ((output - target) / std).square().sum() / (2 * output.shape[0])
        return squares + self._constant(output, std)

    def least_of(self, output: Tensor) -> float:
        if math.isfinite(self.least) or type(self).forward is not Gaussian.forward:
            return self.least
        return float(self._constant(output, self.std))

    @staticmethod
    def _constant(output: Tensor, std: Tensor) -> Tensor:
        each = std.log().expand(output.shape[1:])
        return each.sum() + math.log(2 * math.pi) / 2 * each.numel()

    def residual(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target) / self._std(output).square()

    def sample(self, output: Tensor, generator: Generator | None = None) -> Tensor:
        noise = torch.randn(
            output.shape, generator=generator, dtype=output.dtype, device=output.device
        )
        return output + self._std(output) * noise

    def fisher(self, output: Tensor) -> Tensor:
        # A number on the CPU works with outputs on any device, but not once it is expanded to their shape.
        return self._std(output).square().reciprocal().to(output.device).expand_as(output)

    def _std(self, output: Tensor) -> Tensor:
        return self.std.detach().to(output.dtype)


class LearnedGaussian(Gaussian):
    r"""Normal targets around the network's output, with learned standard deviations of at least ``min_std``, one per output.

    ``n`` is the shape of one sample's output. The parameter is :math:`\ln σ`, whose Fisher information is 2 for every
    output, whatever the network does. The default ``min_std=1/256`` is the resolution of 8-bit images.
    """

    def __init__(self, n: int | Sequence[int], min_std: float = 1 / 256) -> None:
        nn.Module.__init__(self)
        if not (math.isfinite(min_std) and min_std > 0):
            raise ValueError(f"min_std must be positive and finite, not {min_std}")
        self.min_std = min_std
        self.log_std = nn.Parameter(torch.zeros(n))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedGaussian:
        nn.Module._apply(self, fn, recurse)
        return self

    def _check(self, output: Tensor, target: Tensor) -> None:
        _Elementwise._check(self, output, target)
        if self.log_std.shape != output.shape[1:]:
            raise ValueError(
                f"LearnedGaussian was made for outputs of shape {tuple(self.log_std.shape)}, and these have "
                f"{tuple(output.shape[1:])}: there is one standard deviation for each, "
                f"LearnedGaussian({tuple(output.shape[1:])})"
            )

    def least_of(self, output: Tensor) -> float:
        return self.least

    @property
    def std(self) -> Tensor:  # type: ignore[override]
        # The bound changes the value but not the derivative, so that a σ at the bound can still grow.
        bounded = self.log_std.detach().clamp_min(math.log(self.min_std)) - self.log_std.detach()
        return (self.log_std + bounded).exp()

    def parameter_fisher(self) -> dict[nn.Parameter, Tensor]:
        return {self.log_std: torch.full_like(self.log_std, 2.0)}

    def along(self, p: Tensor, step: Tensor) -> Tensor:
        r"""A part :math:`a` of the natural step averages variances, :math:`σ^2 ← (1 - a)\, σ^2 + a\, e^2`.

        Applied to :math:`\ln σ` directly, it would be linear in the squared errors :math:`e^2`, and too long for large ones.
        """
        return torch.log1p(2 * step.clamp_min(-0.25)) / 2  # a ≤ 1/2, so the step ≥ -1/4

    @torch.no_grad()
    def project_(self) -> None:
        self.log_std.clamp_(min=math.log(self.min_std))


class Bernoulli(_Elementwise):
    r"""Independent binary targets with the network's output as logits; targets may be anywhere in [0, 1].

    .. math:: ℓ = -\sum_k \bigl[t_k \ln y_k + (1 - t_k) \ln(1 - y_k)\bigr], \qquad y = \mathrm{sigmoid}(\text{output})
    """

    least = 0.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self._check(output, target)
        if target.device.type == "cpu" and bool(((target < 0) | (target > 1)).any()):
            raise ValueError("Bernoulli wants targets between 0 and 1")
        total = F.binary_cross_entropy_with_logits(output, target, reduction="sum")
        return total / output.shape[0]

    def residual(self, output: Tensor, target: Tensor) -> Tensor:
        return output.sigmoid() - target

    def sample(self, output: Tensor, generator: Generator | None = None) -> Tensor:
        y = torch.nan_to_num(output.sigmoid(), nan=0.5)
        return torch.bernoulli(y, generator=generator)

    def fisher(self, output: Tensor) -> Tensor:
        y = output.sigmoid()
        return y * (1 - y)


def _not_empty(output: Tensor) -> None:
    if not output.dim() or 0 in (output.shape[:-1] or output.shape):
        raise ValueError(
            f"the criterion was given an output of shape {tuple(output.shape)}: there is no sample in it"
        )
