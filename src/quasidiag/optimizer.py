r"""The optimizer: :math:`θ ← θ - η M^{-1} v` with the metric's moving average :math:`M`, block by block."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quasidiag import collect
from quasidiag.blocks import REDUCTIONS, DiagonalBlock, find_blocks
from quasidiag.metrics import METRICS
from quasidiag.moments import Moments
from quasidiag.outputs import OutputModel

Groups = list[dict[str, Any]]


class Riemannian(Optimizer):
    r"""Riemannian gradient descent with the metric and the reduction of your choice.

    Each step, with the minibatch's gradient :math:`v` and the metric :math:`M_b` of the minibatch:

    .. math::
        M &← (1-γ) M + γ M_b \\
        θ &← θ - η M^{-1} v

    where :math:`M^{-1}` is taken unit by unit (:mod:`quasidiag.reductions`). The loop is the one everybody has::

        optimizer = Riemannian(model, criterion, lr=1e-2)
        for x, t in loader:
            optimizer.zero_grad()
            criterion(model(x), t).backward()
            optimizer.step()

    Args:
        model: the model to train. Its layers are watched while it is in training mode.
        criterion: an output model (:mod:`quasidiag.outputs`). The outer product metric needs none, and then takes any
            loss that is a mean (or sum, see ``loss_reduction``) over the batch.
        lr: the step size :math:`η`, a number or a tensor.
        metric: ``"outer-product"``, ``"monte-carlo"``, ``"exact"`` or ``"backpropagated"``.
        reduction: ``"quasi-diagonal"``, ``"diagonal"`` or ``"unitwise"``.
        gamma: the weight of each new minibatch in the moving average.
        eps: added to the metric's diagonal.
        floor: a lower bound on the solve's denominator; ``None`` means ``eps``, as in the paper, ``0.0`` none.
        samples: targets drawn per sample, for the Monte Carlo metric.
        momentum: of the Riemannian gradient, as in ``torch.optim.SGD``.
        weight_decay: decoupled, as in AdamW. It breaks the invariance.
        maximize: go up the loss.
        params: param groups as in ``torch.optim``, each with its own ``lr``, ``gamma``, ``eps``, ``floor``,
            ``momentum``, ``weight_decay``; by default all that is trainable in the model and the criterion.
        metric_start: ``"first"`` sets the metric by the first minibatch, an integer averages that many
            (:math:`γ_t = \max(γ, 1/(t+1))`), ``"identity"`` starts at the identity matrix.
        metric_every: update the metric every so many steps.
        metric_fraction: the share of each minibatch that enters the metric.
        loss_reduction: ``"mean"`` or ``"sum"``; what the loss does over the batch, where there is no criterion.
        seed: of the generator of the Monte Carlo targets.
        nonfinite: ``"skip"`` reports a minibatch with a gradient that is not finite and leaves everything as it was,
            ``"raise"`` raises.
        capturable: never wait for the device, so that a step can be captured in a CUDA graph; minibatches are then not
            looked at for finiteness.

    What is not in a layer that quasidiag knows follows a diagonal rule of its own, the one of
    :class:`quasidiag.AdaGrad`; parameters of the criterion are divided by their Fisher information.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: OutputModel | None = None,
        *,
        lr: float | Tensor | None = None,
        metric: str = "outer-product",
        reduction: str = "quasi-diagonal",
        gamma: float = 0.01,
        eps: float = 1e-8,
        floor: float | None = None,
        samples: int = 1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        params: Groups | None = None,
        metric_start: str | int = "first",
        metric_every: int = 1,
        metric_fraction: float = 1.0,
        loss_reduction: str = "mean",
        seed: int = 0,
        nonfinite: str = "skip",
        capturable: bool = False,
    ) -> None:
        lr = 1e-2 if lr is None else lr
        _one_of("metric", metric, METRICS)
        _one_of("reduction", reduction, tuple(REDUCTIONS))
        _one_of("loss_reduction", loss_reduction, ("mean", "sum"))
        _one_of("nonfinite", nonfinite, ("skip", "raise"))
        _whole("samples", samples)
        _whole("metric_every", metric_every)
        if not isinstance(metric_start, int):
            _one_of("metric_start", metric_start, ("first", "identity"))
        else:
            _whole("metric_start", metric_start)
        if not 0 < metric_fraction <= 1:
            raise ValueError(f"metric_fraction must be in (0, 1], not {metric_fraction}")
        if metric != "outer-product" and not isinstance(criterion, OutputModel):
            raise ValueError(
                f"the {metric} metric needs to know what the output means: pass the criterion, such as "
                f"qd.Categorical(), that also computes your loss (got {criterion!r})"
            )
        self.model, self.criterion = model, criterion
        self.metric, self.reduction, self.metric_start = metric, reduction, metric_start
        self.metric_every, self.nonfinite, self.capturable = metric_every, nonfinite, capturable
        defaults = dict(
            lr=lr,
            gamma=gamma,
            eps=eps,
            floor=floor,
            momentum=momentum,
            weight_decay=weight_decay,
            maximize=maximize,
        )
        super().__init__(params or _everything(model, criterion), defaults)
        self.steps = 0
        self._find()
        adapters = {module: block.adapter for module, block in self._owner.items()}
        self._collector = collect.Collector(
            model, adapters, criterion, metric, samples, metric_fraction, loss_reduction, seed
        )

    def _find(self) -> None:
        """Which parameter belongs to what: a block, the criterion, or the diagonal rule."""
        trained = [p for group in self.param_groups for p in group["params"]]
        self._group = {p: group for group in self.param_groups for p in group["params"]}
        self._blocks, self._owner = find_blocks(self.model, trained, self.reduction)
        covered = {p for block in self._blocks for p in block.parameters}
        if self.criterion is not None:
            covered |= set(self.criterion.parameter_fisher())
        self._others = [p for p in trained if p not in covered]
        self._warn_others()

    def _warn_others(self) -> None:
        others = set(self._others)
        names = {
            f"{name or 'the model itself'} ({type(module).__name__})"
            for name, module in self.model.named_modules()
            if others & set(module.parameters(recurse=False))
        }
        if names:
            warnings.warn(
                f"no block structure is known for {', '.join(sorted(names))}: their parameters follow the diagonal "
                "rule of qd.AdaGrad. qd.register_layer teaches quasidiag a new layer.",
                stacklevel=4,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; its layers are watched from the next forward pass on."""
        group = {**self.defaults, **param_group}
        for name in ("lr", "gamma", "eps", "floor", "momentum", "weight_decay"):
            _check_number(name, group[name])
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                raise TypeError("quasidiag does not train complex parameters")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the metric by the minibatch, and the parameters by its Riemannian gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._ready():
            self._update_metric()
            for parameter, w in self._directions():
                self._apply_(parameter, w)
            if self.criterion is not None:
                self.criterion.project_()
        self._forget()
        return loss

    @torch.no_grad()
    def precondition_(self) -> None:
        """Update the metric and turn every ``.grad`` into the Riemannian gradient, in place.

        For people who bring their own optimizer, which then takes the step.
        """
        if self._ready():
            self._update_metric()
            for parameter, w in list(self._directions()):
                assert parameter.grad is not None
                parameter.grad.copy_(w)
        self._forget()

    def moments(self, layer: nn.Module) -> Moments:
        """The moments of a layer's units, averaged so far."""
        block = self._owner.get(layer)
        if block is None:
            raise KeyError(f"{type(layer).__name__} is not a layer that this optimizer watches")
        if "updates" not in self.state[block.home]:
            raise RuntimeError(f"{block.name} has no moments yet: take a step first")
        return block.moments(self.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._collector.clear()

    def close(self) -> None:
        """Leave the model: no hook stays behind. The state can still be read and saved."""
        self._collector.close()

    def __enter__(self) -> Riemannian:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ready(self) -> bool:
        """Whether the minibatch can be used; raises before anything has changed if the call makes no sense."""
        gradients = [(p, p.grad) for p in self._group if p.grad is not None]
        if not gradients:
            raise RuntimeError("step() without a gradient: call loss.backward() first")
        for parameter, gradient in gradients:
            if gradient.is_sparse or gradient.is_complex():
                kind = "sparse" if gradient.is_sparse else "complex"
                raise TypeError(
                    f"{self._name(parameter)} has a {kind} gradient: make it dense and real"
                )
        if self._collector.probe.enabled:
            seen = {self._owner[record.module] for record in self._collector.records}
            for block in self._blocks:
                if block.home.grad is not None and block not in seen and not self._started(block):
                    raise RuntimeError(self._unseen(block))
        return self.capturable or self._finite(gradients)

    def _finite(self, gradients: list[tuple[Tensor, Tensor]]) -> bool:
        norms = torch._foreach_norm([gradient for _, gradient in gradients])
        sums = [record.w.sum() for record in self._collector.records]
        if bool(torch.stack([x.float() for x in (*norms, *sums)]).isfinite().all()):
            return True
        bad = [self._name(p) for (p, _), norm in zip(gradients, norms) if not norm.isfinite()]
        bad = bad or ["the metric"]
        message = f"a minibatch was skipped: its gradient is not finite in {', '.join(bad[:3])}"
        if self.nonfinite == "raise":
            self._forget()
            raise FloatingPointError(message + ". Lower the learning rate, or look at the data.")
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        return False

    def _started(self, block: DiagonalBlock) -> bool:
        return "updates" in self.state.get(block.home, {})

    def _unseen(self, block: DiagonalBlock) -> str:
        if self.criterion is not None and not self._collector.passes:
            return (
                "the metric saw no loss: compute it with the criterion that the optimizer was given, on the output of a "
                "forward pass in training mode made after the optimizer"
            )
        return (
            f"the metric saw no backward pass through {block.name}: call model.train(), and make the forward pass after "
            "the optimizer"
        )

    def _update_metric(self) -> None:
        r""":math:`M ← (1-γ) M + γ M_b`."""
        if not self._collector.probe.enabled:
            return
        factor = self._collector.factor()
        fresh: dict[DiagonalBlock, float] = {}
        for module, a, w in self._collector.records:
            block = self._owner[module]
            if not self._started(block):
                dtype = torch.promote_types(block.home.dtype, torch.float32)
                block.start(self.state, a, dtype, self.metric_start == "identity")
            gamma = self._gamma(block)
            w = w.to(torch.promote_types(block.home.dtype, torch.float32))
            if isinstance(factor, Tensor):
                w, gain = w * factor, gamma
            else:
                gain = gamma * factor
            keep = 1.0 if block in fresh else 1.0 - gamma
            fresh[block] = gamma
            block.accumulate_(self.state, module, a, w, keep, gain)
        for block in fresh:
            block.finish_update(self.state)

    def _gamma(self, block: DiagonalBlock) -> float:
        gamma, t = self._group[block.home]["gamma"], self.state[block.home]["updates"]
        if self.metric_start == "identity":
            return gamma
        first = 1 if self.metric_start == "first" else int(self.metric_start)
        return max(gamma, 1 / (t + 1)) if t < first else gamma

    def _directions(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The Riemannian gradient of every parameter that has one."""
        for block in self._blocks:
            if all(p.grad is None for p in block.parameters):
                continue
            group = self._group[block.home]
            gradients = [self._gradient(p) for p in block.parameters]
            solved = block.solve(self.state, gradients, group["eps"], group["floor"])
            yield from ((p, w) for p, w in zip(block.parameters, solved) if p.grad is not None)
        if self.criterion is not None:
            for p, fisher in self.criterion.parameter_fisher().items():
                if p in self._group and p.grad is not None:
                    yield p, self._gradient(p) / (fisher + self._group[p]["eps"])
        for p in self._others:
            if p.grad is not None:
                yield p, self._adagrad(p)

    def _gradient(self, parameter: Tensor) -> Tensor:
        """The gradient of the mean loss, in the metric's precision, downhill."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.grad is None:
            return torch.zeros_like(parameter, dtype=dtype)
        gradient = parameter.grad.to(dtype)
        if self.criterion is None and self._collector.loss_reduction == "sum":
            gradient = gradient / self._collector.total
        return -gradient if self._group[parameter]["maximize"] else gradient

    def _adagrad(self, parameter: nn.Parameter) -> Tensor:
        """The diagonal rule for what is in no block (see :class:`quasidiag.AdaGrad`)."""
        group, state, v = self._group[parameter], self.state[parameter], self._gradient(parameter)
        if "square" not in state:
            state["square"] = v.square()
        else:
            state["square"].lerp_(v.square(), group["gamma"])
        return v / (state["square"].sqrt() + group["eps"])

    def _apply_(self, parameter: nn.Parameter, w: Tensor) -> None:
        group = self._group[parameter]
        lr = group["lr"]
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = w.clone()
            else:
                state["momentum"].mul_(group["momentum"]).add_(w)
            w = state["momentum"]
        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        if isinstance(lr, Tensor):
            parameter.sub_((lr * w).to(parameter.dtype))
        else:
            parameter.add_(w.to(parameter.dtype), alpha=-lr)

    def _forget(self) -> None:
        """No reference to the batch survives the step."""
        self._collector.clear()
        self.steps += 1
        self._collector.probe.enabled = self.steps % self.metric_every == 0

    def _name(self, parameter: Tensor) -> str:
        names = [*self.model.named_parameters()]
        if self.criterion is not None:
            names += [(f"criterion.{name}", p) for name, p in self.criterion.named_parameters()]
        return next((name for name, p in names if p is parameter), "a parameter")

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim``, and the place of the Monte Carlo generator."""
        generator = self._collector.generator
        return {
            **super().state_dict(),
            "steps": self.steps,
            "generator": None if generator is None else generator.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim``; the metric keeps its own precision whatever the parameters' is."""
        plain = {key: state_dict[key] for key in ("state", "param_groups")}
        super().load_state_dict(plain)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for parameter, index in zip(parameters, indices):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
        self.steps = state_dict.get("steps", 0)
        self._collector.probe.enabled = self.steps % self.metric_every == 0
        self._group = {p: group for group in self.param_groups for p in group["params"]}
        if state_dict.get("generator") is not None:
            generator = self._collector._generator(parameters[0].device)
            generator.set_state(state_dict["generator"].cpu())


def _everything(model: nn.Module, criterion: nn.Module | None) -> Groups:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    if criterion is not None:
        known = set(parameters)
        parameters += [p for p in criterion.parameters() if p.requires_grad and p not in known]
    return [{"params": parameters}]


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _whole(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_number(name: str, value: float | Tensor | None) -> None:
    if value is None and name == "floor":
        return
    number = float(value)  # type: ignore[arg-type]
    limit = 1.0 if name in ("gamma", "momentum") else math.inf
    if not (math.isfinite(number) and 0 <= number <= limit):
        bound = "between 0 and 1" if limit == 1.0 else "finite and not negative"
        raise ValueError(f"{name} must be {bound}, not {value!r}")
