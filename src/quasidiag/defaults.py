"""Default values of the optimizer's arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Defaults(NamedTuple):
    """The default values for one kind of step."""

    lr: float
    metric: str
    orthogonal: bool
    averaged: bool
    gamma: float
    eps: float
    metric_start: str | int
    metric_every: int | None
    metric_fraction: float | None
    sharing: str
    step_every: int | None
    safeguard: tuple[float, float, float] | None

    def but(self, **given: Any) -> Defaults:
        """A copy with the values that were given, those that are not ``None``, in place of the defaults.

        With the exact metric, sequences would have to be kept for each of its vectors, so positions are counted.
        """
        values = {name: value for name, value in given.items() if value is not None}
        if values.get("metric") == "exact":
            values.setdefault("sharing", "expand")
        return self._replace(**values)


#: The arguments ``unit``, ``layer`` and ``dead`` of ``reductions.safeguarded``.
SAFEGUARD = (0.1, 0.1, 0.1)
#: ``fixed`` has the paper's values. With ``auto``, ``lr`` is a factor of the step's own length, the metric starts as a
#: plain average, and relative safeguards take the place of ``eps``.
DEFAULTS = {
    "fixed": Defaults(
        lr=1e-2,
        metric="outer-product",
        orthogonal=False,
        averaged=False,
        gamma=0.01,
        eps=1e-8,
        metric_start="first",
        metric_every=1,
        metric_fraction=1.0,
        sharing="expand",
        step_every=1,
        safeguard=None,
    ),
    "auto": Defaults(
        lr=1.0,
        metric="monte-carlo",
        orthogonal=True,
        averaged=True,
        gamma=0.1,
        eps=0.0,
        metric_start=1_000_000,
        metric_every=None,
        metric_fraction=None,
        sharing="recurrent",
        step_every=None,
        safeguard=SAFEGUARD,
    ),
}


def everything(model: nn.Module, criterion: nn.Module | None) -> list[dict[str, Any]]:
    """One param group with all trainable parameters of the model and the criterion."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    if criterion is not None:
        known = set(parameters)
        parameters += [p for p in criterion.parameters() if p.requires_grad and p not in known]
    return [{"params": parameters}]
