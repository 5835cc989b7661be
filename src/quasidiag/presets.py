"""The paper's six Riemannian algorithms: :class:`Riemannian` with a fixed metric and reduction, and the paper's defaults."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from quasidiag.optimizer import Riemannian
from quasidiag.outputs import OutputModel


class _Preset(Riemannian):
    _metric: ClassVar[str]
    _reduction: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        criterion: OutputModel | None = None,
        lr: float | Tensor = 1e-2,
        **options: Any,
    ) -> None:
        """With all options of :class:`Riemannian` that a fixed step has.

        The defaults are the paper's: ``gamma=0.01``, ``eps=1e-8``, ``floor=eps``. The authors' own program has ``floor=0``,
        and ``gamma=0.1`` with the Monte Carlo metric.
        """
        for name in ("metric", "reduction", "step"):
            if name in options:
                raise TypeError(
                    f"{type(self).__name__} has its own {name}: use qd.Riemannian to choose another"
                )
        super().__init__(
            model,
            criterion,
            lr=lr,
            step="fixed",
            metric=self._metric,
            reduction=self._reduction,
            **options,
        )


class DOP(_Preset):
    """Diagonal outer product (``metric="outer-product"``, ``reduction="diagonal"``)."""

    _metric, _reduction = "outer-product", "diagonal"


class QDOP(_Preset):
    """Quasi-diagonal outer product (``metric="outer-product"``, ``reduction="quasi-diagonal"``)."""

    _metric, _reduction = "outer-product", "quasi-diagonal"


class DMCNat(_Preset):
    """Diagonal Monte Carlo natural gradient (``metric="monte-carlo"``, ``reduction="diagonal"``)."""

    _metric, _reduction = "monte-carlo", "diagonal"


class QDMCNat(_Preset):
    """Quasi-diagonal Monte Carlo natural gradient (``metric="monte-carlo"``, ``reduction="quasi-diagonal"``)."""

    _metric, _reduction = "monte-carlo", "quasi-diagonal"


class DNat(_Preset):
    """Diagonal natural gradient (``metric="exact"``, ``reduction="diagonal"``)."""

    _metric, _reduction = "exact", "diagonal"


class QDNat(_Preset):
    """Quasi-diagonal natural gradient (``metric="exact"``, ``reduction="quasi-diagonal"``)."""

    _metric, _reduction = "exact", "quasi-diagonal"
