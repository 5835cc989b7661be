r"""The metric of each layer and the last steps, as numbers, a table, or TensorBoard scalars::

    print(qd.diagnostics(optimizer))
    qd.diagnostics(optimizer).log(writer, step)

The entries of a unit's metric are those in the coordinates in which it is diagonal: its ``m00`` and the weighted variances
:math:`σ_i^2 = m_{ii} - m_{0i}^2/m_{00}` of its inputs (for the diagonal reduction ``mii``; for the unitwise one the
eigenvalues), with the safeguards and ``eps`` that the solve adds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quasidiag.auto.report import Report
from quasidiag.auto.stacks import Alone, Stack
from quasidiag.blocks import DiagonalBlock, QuasiDiagonalBlock
from quasidiag.optimizer import Riemannian
from quasidiag.reductions import varies
from quasidiag.sharding import rows_of
from quasidiag.units import kind_of
from quasidiag.unitwise import UnitwiseBlock

#: A unit is dead if its ``m00`` (without a bias: the mean of its ``mii``) is at most this part of its layer's mean.
DEAD = 1e-6
#: A larger share of dead units than this is remarked upon.
MANY = 0.1


@dataclass(frozen=True)
class LayerDiagnostics:
    r"""The metric of one layer, or of one block of a layer that has several.

    Attributes:
        name: name of the layer in the model.
        layer: class of the layer.
        reduction: ``quasi-diagonal``, ``diagonal`` or ``unitwise``; a layer without a bias is diagonal.
        units: number of units.
        updates: number of minibatches in the metric so far.
        condition: ratio of the largest to the smallest entry of a unit's metric; the median over units.
        dead: share of units that the loss hardly depends on.
        floored: share of entries that the floor bounds, or whose input never varied, so that they get no step.
        moved: squared length :math:`δ^⊤ M δ` of the layer's move since the quadratic model was last measured,
            ``step.stride`` steps ago (after one step, all layers add up to ``step.length``). NaN with ``step="fixed"``,
            which does not keep it, or if the move was undone.
    """

    name: str
    layer: str
    reduction: str
    units: int
    updates: int
    condition: float
    dead: float
    floored: float
    moved: float


@dataclass(frozen=True)
class Diagnostics:
    """Result of :func:`diagnostics`: all layers, the report of ``step="auto"`` (else ``None``), the number of steps."""

    layers: list[LayerDiagnostics]
    #: The parameters that are in no known layer, and follow the diagonal rule of :class:`quasidiag.AdaGrad`.
    others: list[str]
    step: Report | None
    steps: int

    def as_dict(self) -> dict[str, Any]:
        """The same as nested dictionaries and lists of plain numbers and strings, as for JSON."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """The numbers by name, such as ``0/condition`` (layer ``0``) or ``step/alpha``, without those that are NaN."""
        found = {
            f"{layer.name}/{key}": float(getattr(layer, key))
            for layer in self.layers
            for key in ("condition", "dead", "floored", "moved")
        }
        if self.step is not None:
            numbers = {key: v for key, v in vars(self.step).items() if isinstance(v, int | float)}
            found |= {f"step/{key}": float(v) for key, v in numbers.items()}
        return {key: value for key, value in found.items() if not math.isnan(value)}

    def log(self, writer: Any, step: int | None = None, prefix: str = "quasidiag") -> None:
        """Write all :meth:`scalars` to a TensorBoard ``SummaryWriter``, or any object with its ``add_scalar``."""
        for name, value in self.scalars().items():
            writer.add_scalar(f"{prefix}/{name}", value, self.steps if step is None else step)

    def __str__(self) -> str:
        head = ["layer", "", "reduction", "units", "condition", "dead", "floored", "moved"]
        rows = [
            [
                x.name,
                x.layer,
                x.reduction,
                str(x.units),
                f"{x.condition:.1e}",
                f"{x.dead:.1%}",
                f"{x.floored:.1%}",
                "" if math.isnan(x.moved) else f"{x.moved:.2e}",
            ]
            for x in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 3 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in [head, *rows]
        ]
        return "\n".join([*lines, *self._remarks()])

    def _remarks(self) -> list[str]:
        """What the table does not say, or says too quietly."""
        remarks = [
            f"{x.name}: the loss hardly depends on {x.dead:.0%} of the units (saturated, or never active?)"
            for x in self.layers
            if x.dead > MANY
        ]
        if self.others:
            remarks.append(f"by the diagonal rule of qd.AdaGrad: {', '.join(self.others)}")
        if self.step is not None:
            s = self.step
            remarks.append(
                f"step {s.steps}: alpha {s.alpha:.3g}, damping {s.damping:.3g}, {_times(s.retreats, 'retreat')} so far; the "
                f"step that was measured last promised to change the loss by {s.predicted:.3g}"
            )
            if not math.isnan(s.actual):
                remarks.append(
                    f"the steps that were judged last changed it by {s.actual:.3g}, {s.ratio:.2f} of what they promised"
                )
            if s.stride:
                remarks.append(
                    f"moved: squared length in the metric over the last {_times(s.stride, 'step')}"
                )
        return remarks


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


class _Entries(NamedTuple):
    """The metric's diagonal ``values: [units, n]`` in its own coordinates, and which of them the solve bounds or skips."""

    values: Tensor
    bounded: Tensor
    weight: Tensor


@torch.no_grad()
def diagnostics(optimizer: Riemannian) -> Diagnostics:
    """The metric of each layer that has one so far, and a report of the optimizer's last steps."""
    if not isinstance(optimizer, Riemannian):
        raise TypeError(
            f"diagnostics are of a metric, and {type(optimizer).__name__} has none: expected qd.Riemannian or a preset of it"
        )
    layers = [_layer(optimizer, block) for block in optimizer._blocks if optimizer._started(block)]
    report = None if optimizer.auto is None else Report(**vars(optimizer.auto))
    others = [optimizer.name_of(p) for p in optimizer._others]
    return Diagnostics(layers, others, report, optimizer.steps)


def _layer(optimizer: Riemannian, block: DiagonalBlock) -> LayerDiagnostics:
    rows, state = rows_of(block, optimizer.state)
    group = optimizer._group[block.home]
    eps = float(group["eps"])
    floor = eps if group["floor"] is None else float(group["floor"])
    entries = _entries(rows, state, eps, floor)
    counted = torch.where(entries.bounded | (entries.values <= 0), math.nan, entries.values)
    largest = counted.nan_to_num(0.0).amax(1)
    smallest = counted.nan_to_num(math.inf).amin(1)
    alive = largest > 0
    ratios = (largest / smallest)[alive]
    dead = entries.weight <= DEAD * entries.weight.mean()
    kinds = {QuasiDiagonalBlock: "quasi-diagonal", UnitwiseBlock: "unitwise"}
    return LayerDiagnostics(
        name=block.name,
        layer=kind_of(block, optimizer.model),
        reduction=kinds.get(type(rows), "diagonal"),
        units=len(entries.weight),
        updates=int(state[rows.home]["updates"]),
        condition=float(ratios.median()) if len(ratios) else math.nan,
        dead=float(dead.double().mean()),
        floored=float(entries.bounded.double().mean()),
        moved=_moved(optimizer, block),
    )


def _moved(optimizer: Riemannian, block: DiagonalBlock) -> float:
    updates = [optimizer.state[p].get("update") for p in block.parameters]
    kept = [u for u in updates if u is not None]
    if len(kept) < len(updates):
        return math.nan
    stack = Alone([block]) if isinstance(block, UnitwiseBlock) else Stack([block])
    return float(stack.forms(optimizer.state, [[kept]]).sum())


def _entries(block: DiagonalBlock, state: Any, eps: float, floor: float) -> _Entries:
    if isinstance(block, UnitwiseBlock):
        return _unitwise(block, state, eps, floor)
    if isinstance(block, QuasiDiagonalBlock):
        return _quasi_diagonal(block, state, eps, floor)
    kept = [m + eps for m in block._bounded(block.kept(state))]
    units = [m.reshape(len(m) if m.dim() else 1, -1) for m in kept]
    # The units of some weights (a transposed convolution's, say) are not along the first dimension.
    alone = len({len(m) for m in units}) > 1
    values = torch.cat([m.reshape(1, -1) for m in kept] if alone else units, dim=1)
    plain = [m for m in block.kept(state) if m is not None]
    weight = plain[0] if block.bias is not None else plain[0].reshape(len(values), -1).mean(1)
    return _Entries(values, values <= floor, weight.reshape(-1))


def _quasi_diagonal(block: QuasiDiagonalBlock, state: Any, eps: float, floor: float) -> _Entries:
    m00, m0i, mii = block._moment_rows(state)
    shift = state[block.weight].get("shift")
    c = torch.zeros(m0i.shape[1], dtype=m0i.dtype, device=m0i.device) if shift is None else shift
    d0, row, diagonal = m00 + eps, m0i - eps * c, mii + eps * (1 + c.square())
    inverse = torch.where(d0 > 0, d0.reciprocal(), 0.0).unsqueeze(1)
    variance = diagonal - row * inverse * row
    bounded = ~varies(m00, mii, variance, diagonal, shift) | (variance < floor * inverse)
    values = torch.cat([d0.unsqueeze(1), variance], dim=1)
    bounded = torch.cat([(d0 <= 0).unsqueeze(1), bounded], dim=1)
    own = block.kept(state).m00
    assert own is not None
    return _Entries(values, bounded, own.reshape(-1))


def _unitwise(block: UnitwiseBlock, state: Any, eps: float, floor: float) -> _Entries:
    kept = state[block.weight]["block"]
    values = torch.linalg.eigvalsh(block._guarded(state)) + eps
    unit = kept.shape[-1] * torch.finfo(kept.dtype).eps
    bounded = (values <= unit * values[:, -1:]) | (values < floor)
    diagonal = kept.diagonal(dim1=1, dim2=2)
    weight = diagonal.mean(1) if block.bias is None else diagonal[:, 0]
    return _Entries(values, bounded, weight)
