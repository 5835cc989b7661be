"""Checks of arguments: each raises an error that names what is wrong, before anything has changed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from quasidiag.callers import outside
from quasidiag.metrics import METRICS
from quasidiag.outputs import OutputModel
from quasidiag.sharing import SHARINGS
from quasidiag.units import REDUCTIONS

#: The output model to use in place of each usual loss.
INSTEAD = {
    nn.CrossEntropyLoss: "qd.Categorical()",
    nn.MSELoss: "qd.Gaussian()",
    nn.GaussianNLLLoss: "qd.LearnedGaussian(n)",
    nn.BCEWithLogitsLoss: "qd.Bernoulli()",
}


def one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in (choices := tuple(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def flags(**given: object) -> None:
    """Raise unless each is ``True``, ``False`` or ``None``."""
    for name, value in given.items():
        one_of(name, value, (None, True, False))


def whole(name: str, value: object) -> None:
    """Raise unless ``value`` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def number(name: str, value: Any) -> None:
    """Raise unless ``value`` is valid for ``name`` in a param group."""
    if value is None and name == "floor":
        return
    try:
        given = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        given = None
    if given is None:
        raise TypeError(f"{name} must be a number, not {value!r}")
    limit = 1.0 if name in ("gamma", "momentum") else math.inf
    if not (math.isfinite(given) and 0 <= given <= limit):
        bound = "between 0 and 1" if limit == 1.0 else "finite and not negative"
        raise ValueError(f"{name} must be {bound}, not {value!r}")


def options(**given: Any) -> None:
    """Raise unless the options that are not numbers of a param group are valid."""
    one_of("metric", given["metric"], METRICS)
    one_of("reduction", given["reduction"], REDUCTIONS)
    one_of("sharing", given["sharing"], SHARINGS)
    one_of("loss_reduction", given["loss_reduction"], ("mean", "sum"))
    one_of("nonfinite", given["nonfinite"], ("skip", "raise"))
    whole("samples", given["samples"])
    if not isinstance(given["seed"], int) or isinstance(given["seed"], bool):
        raise ValueError(f"seed must be an int, not {given['seed']!r}")
    for name in ("metric_every", "step_every"):
        if given[name] is not None:
            whole(name, given[name])
    if isinstance(given["metric_start"], str):
        one_of("metric_start", given["metric_start"], ("first", "identity"))
    else:
        whole("metric_start", given["metric_start"])
    for name in ("metric_fraction", "step_fraction"):
        if given[name] is not None:
            fraction(name, given[name])
    if given["metric"] == "backpropagated" and given["sharing"] in ("exact", "reduce"):
        raise ValueError(
            "the backpropagated metric has no derivatives to sum: leave sharing out, or use 'expand'"
        )
    if given["metric"] == "backpropagated" and (given["metric_fraction"] or 1) < 1:
        raise ValueError("the backpropagated metric takes the whole minibatch: use metric_every")


def model(given: object) -> None:
    """Raise unless the model is a module that runs itself, not copies of itself as ``nn.DataParallel`` does."""
    if not isinstance(given, nn.Module):
        raise TypeError(
            f"give the model itself, whose layers are watched (this is of type {type(given).__name__}): "
            "qd.Riemannian(model, ...); params= is for param groups"
        )
    if any(isinstance(module, nn.DataParallel) for module in given.modules()):
        raise TypeError(
            "nn.DataParallel runs copies of the model, which nobody can watch: give the model itself, or use "
            "nn.parallel.DistributedDataParallel"
        )


def criterion(given: object, metric: str, loss_reduction: str) -> None:
    """Raise unless the criterion is an output model, or is missing where the metric needs none."""
    if isinstance(given, OutputModel):
        if loss_reduction != "mean":
            raise ValueError(
                f"loss_reduction={loss_reduction!r} is for losses that quasidiag does not know: {type(given).__name__} "
                "is a mean over the batch, and loss_reduction must be left out"
            )
        return
    if given is None and metric == "outer-product":
        return
    if given is None:
        raise ValueError(
            f"the {metric} metric needs to know what the output means: pass the criterion, such as qd.Categorical(), "
            "that also computes your loss"
        )
    name = given.__name__ if isinstance(given, type) else type(given).__name__
    better = next((new for old, new in INSTEAD.items() if isinstance(given, old)), None)
    advice = f"use {better}" if better else "use one such as qd.Categorical()"
    if isinstance(given, type) and issubclass(given, OutputModel):
        advice = f"pass an instance, {name}()"
    if metric == "outer-product":
        advice += ", or leave it out: the outer product metric takes any loss that is a mean over the batch"
    raise TypeError(
        f"the criterion must be an output model, which knows the distribution behind the loss, and {name} is not: "
        f"{advice}"
    )


def fraction(name: str, value: float) -> None:
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value <= 1):
        raise ValueError(f"{name} must be in (0, 1], not {value!r}")


def safeguard(
    value: Any, default: tuple[float, float, float] | None
) -> tuple[float, float, float] | None:
    """The three bounds as a tuple, or ``None``; raises if ``value`` is neither, nor ``"default"``."""
    if value is None or value == "default":
        return default if value else None
    bounds = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(bounds) != 3 or not all(
        isinstance(b, (int, float)) and 0 <= b < math.inf for b in bounds
    ):
        raise ValueError(
            f"safeguard must be three finite numbers of at least 0, or None, not {value!r}"
        )
    return bounds


#: Factors of all param groups below this look like another optimizer's step sizes.
SMALL_FACTOR = 0.1


def auto(model: nn.Module, criterion: object, capturable: bool, params: Any = None) -> None:
    """Raise if ``step="auto"`` cannot work with these; warn if the ``lr`` of param groups look like step sizes."""
    if criterion is None:
        raise ValueError(
            "step='auto' (no lr) measures the loss's own quadratic model, and needs the criterion, such as "
            "qd.Categorical(), that also computes your loss; or give an lr"
        )
    if capturable:
        raise ValueError(
            "step='auto' solves for its coefficients on the host: capturable needs an lr"
        )
    if any(hasattr(p, "placements") for p in model.parameters()):
        raise ValueError("step='auto' does not cover sharded parameters (fully_shard): give an lr")
    groups = params if isinstance(params, list) else []
    if groups and all(isinstance(g, dict) and 0 < g.get("lr", 1) < SMALL_FACTOR for g in groups):
        warnings.warn(
            "the lr of a param group is a factor of the automatic step, and all of these are small: leave them out, or "
            "give lr= as well if they are meant as step sizes",
            stacklevel=outside(),
        )


#: Options of param groups that ``step="auto"`` does not have, with what to do instead.
NONE_OF_ITS_OWN = {
    "momentum": "leave it out (a scheduler that cycles momentum takes cycle_momentum=False)",
    "maximize": "leave it out",
}


def auto_group(group: dict[str, Any]) -> None:
    """Raise if a param group has an option that ``step="auto"`` does not have."""
    for name in ("lr", "weight_decay"):
        number(name, group[name])
    for name, advice in NONE_OF_ITS_OWN.items():
        if group[name]:
            raise ValueError(
                f"step='auto' averages gradients, takes its length from the quadratic model of the loss, and has no {name} "
                f"of its own: {advice}, or give an lr"
            )


def name_of(parameter: Tensor, model: nn.Module, criterion: nn.Module | None) -> str:
    """The name of a parameter in the model or the criterion."""
    names = [*model.named_parameters()]
    if criterion is not None:
        names += [(f"criterion.{name}", p) for name, p in criterion.named_parameters()]
    return next((name for name, p in names if p is parameter), "a parameter")


def trainable(parameters: Iterable[Tensor], name: Any) -> None:
    """Raise unless the parameters can be trained; ``name(parameter)`` is what a message calls it."""
    for parameter in parameters:
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"{name(parameter)} has no shape yet: run one batch through the model before making the optimizer"
            )
        if parameter.is_complex():
            raise TypeError(
                f"{name(parameter)} is complex, and quasidiag trains real parameters only: keep its real and imaginary "
                "parts apart (torch.view_as_real)"
            )
        if not parameter.is_floating_point():
            raise TypeError(f"{name(parameter)} is of {parameter.dtype}, which cannot be trained")


def one_device(block: Any, state: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raise unless the parameters of a block and its metric are on one device."""
    device = block.home.device
    if [p for p in block.parameters if p.device != device]:
        names = ", ".join(sorted({str(p.device) for p in block.parameters}))
        raise ValueError(
            f"the weight and the bias of {block.name} are on different devices ({names}): a "
            "unit's block must be on one"
        )
    kept = state.get("mii", state.get("m00", state.get("block")))
    if kept is not None and kept.device != device:
        raise ValueError(
            f"{block.name} is on {device} and its metric on {kept.device}: move the model before "
            "making the optimizer, or make a new one and give it this one's state_dict()"
        )


def gradients(pairs: Iterable[tuple[Tensor, Tensor]], name: Any) -> None:
    """Raise unless the gradients are dense and real."""
    for parameter, gradient in pairs:
        if gradient.is_sparse or gradient.is_complex():
            kind = "sparse" if gradient.is_sparse else "complex"
            raise TypeError(f"{name(parameter)} has a {kind} gradient: make it dense and real")


class Structure:
    """Remembers where each layer and parameter is in a model, to notice if that changes."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{name}.{key}".lstrip("."), table, key, held)
            for name, module in model.named_modules()
            for table in (module._modules, module._parameters)
            for key, held in table.items()
        ]

    def check(self, trained: Any) -> None:
        """Raise if a layer was replaced, or a parameter of ``trained`` re-assigned."""
        for name, table, key, held in self._places:
            now = table.get(key)
            if now is held:
                continue
            if isinstance(held, Tensor) and held not in trained:
                continue
            if isinstance(held, nn.Module) and not any(p in trained for p in held.parameters()):
                continue
            raise RuntimeError(
                f"{name} is not the {type(held).__name__} that the optimizer was made for: the model was changed "
                "since. Make a new optimizer after changing a model (its load_state_dict takes what still fits)"
            )


def loadable(state_dict: Any, version: int, automatic: bool) -> None:
    """Raise unless a ``state_dict`` is one of ours, for the same kind of step, and from no newer version."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("this is not the state_dict() of an optimizer")
    made_by = state_dict.get("version", 0)
    if made_by > version:
        raise ValueError(
            f"this state_dict() is of version {made_by}, from a newer quasidiag; this one reads up to {version}"
        )
    keys = {key for kept in state_dict["state"].values() for key in kept}
    if not all({"gamma", "momentum"} <= set(group) for group in state_dict["param_groups"]):
        raise ValueError("this state_dict() is another optimizer's: it holds no metric")
    # torch.distributed.checkpoint does not save "auto": then the kind of step shows only in what it keeps.
    theirs = bool(state_dict["auto"]) if "auto" in state_dict else "update" in keys
    if theirs != automatic and (theirs or "auto" in state_dict or "momentum" in keys):
        kinds = ("with a given lr", "without one (step='auto')")
        raise ValueError(
            f"this state_dict() is of an optimizer {kinds[theirs]}, and this one is {kinds[automatic]}: an lr here is a "
            "factor there, so one cannot go on from the other"
        )


#: The entries of a parameter's state that have its shape.
SHAPED = ("m00", "mii", "average", "update", "apart", "mark", "momentum", "square")


def fits(state_dict: dict[str, Any], parameters: Iterable[Tensor], name_of: Any) -> None:
    """Raise unless what was saved of each parameter has its shape."""
    indices = (i for group in state_dict["param_groups"] for i in group["params"])
    for parameter, index in zip(parameters, indices):
        for key, value in state_dict["state"].get(index, {}).items():
            if key in SHAPED and value.shape != parameter.shape:
                raise ValueError(
                    f"{name_of(parameter)} is {tuple(parameter.shape)}, and this state_dict() is of one that was "
                    f"{tuple(value.shape)}: it belongs to another model"
                )
