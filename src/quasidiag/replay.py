"""The minibatch once more: how the outputs move when the parameters do.

A :class:`Replay` keeps the last minibatch of a model until the optimizer's step, runs the model on a share of it again
and takes the derivatives of the outputs along given directions by forward-mode differentiation, or by differences where
an operation has no forward mode. Buffers (a batch norm's statistics) and random states are as they were afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from quasidiag.outputs import OutputModel
from quasidiag.probe import Hook, tensors

Direction = Mapping[Tensor, Tensor]


class Replay:
    """Remembers the last call of ``model`` in training and what ``criterion`` said of its output."""

    def __init__(self, model: nn.Module, criterion: OutputModel) -> None:
        self.model, self.criterion = model, criterion
        #: Whether some operation of this model turned out to have no forward mode.
        self.by_differences = False
        self.clear()
        self._handles: list[RemovableHandle] = [
            model.register_forward_hook(Hook(self._called), with_kwargs=True),
            criterion.register_forward_hook(Hook(self._judged)),
        ]

    def clear(self) -> None:
        """Let go of the batch."""
        self._call: tuple[Any, Any] | None = None
        self._outputs: list[Tensor] = []
        self._place: tuple[int, torch.Size] | None = None
        self._target: Tensor | None = None
        #: The loss that the criterion gave.
        self.loss: Tensor | None = None

    def close(self) -> None:
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _called(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._call = _slice((args, kwargs), None)
            self._outputs = [x.detach() for x in tensors(output)]

    def _judged(self, criterion: nn.Module, args: tuple[Tensor, ...], loss: Tensor) -> None:
        if not (self.model.training and loss.requires_grad and self._outputs):
            return
        output, self._target = args[0].detach(), args[1].detach()
        self.loss = loss.detach()
        same = [i for i, x in enumerate(self._outputs) if x.data_ptr() == output.data_ptr()]
        like = [i for i, x in enumerate(self._outputs) if x.numel() == output.numel()]
        found = same or like
        self._place = (found[0], output.shape[1:]) if found else None
        self._outputs = []

    @property
    def ready(self) -> bool:
        return self._call is not None and self.loss is not None

    def tangents(
        self, directions: Sequence[Direction], share: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The outputs on a share of the minibatch, their targets, and their derivative along each direction."""
        call = self._share(share)
        if not self.by_differences:
            try:
                pairs = [self._dual(call, u) for u in directions]
                return (*self._judge(pairs[0][0]), [tangent for _, tangent in pairs])
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                self.by_differences = True
        moved = [self._difference(call, u) for u in directions]
        return (*self._judge(self._run(call, {})), moved)

    def value(self) -> Tensor:
        """The loss on the whole minibatch, at the parameters as they are now."""
        assert self._call is not None
        return self.criterion(*self._judge(self._run(self._call, {})))

    def _judge(self, output: Tensor) -> tuple[Tensor, Tensor]:
        assert self._target is not None
        return output, self._target[: len(output)]

    def _share(self, share: float) -> tuple[Any, Any]:
        assert self._call is not None
        batch = next(len(x) for x in tensors(self._call) if x.dim())
        return _slice(self._call, (batch, max(1, math.ceil(share * batch))))

    def _named(self, values: Direction) -> dict[str, Tensor]:
        named = self._module.named_parameters(remove_duplicate=False)
        return {name: values[p] for name, p in named if p in values}

    @property
    def _module(self) -> nn.Module:
        """The model itself, without what was put around it for speed or for several ranks."""
        model = self.model
        while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
            model = getattr(model, "_orig_mod", None) or model.module
        return model

    def _run(self, call: tuple[Any, Any], parameters: Direction) -> Tensor:
        if self._place is None:
            raise RuntimeError(
                "step='auto' could not find the criterion's output among what the model returned: call the criterion "
                "on the model's output itself, or give an lr"
            )
        args, kwargs = call
        buffers = {name: b.clone() for name, b in self._module.named_buffers()}
        with _same_draws(next(iter(self._module.parameters())).device):
            outputs = functional_call(
                self._module, {**self._named(parameters), **buffers}, args, kwargs
            )
        number, shape = self._place
        return list(tensors(outputs))[number].reshape(-1, *shape)

    def _dual(self, call: tuple[Any, Any], direction: Direction) -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            duals = {
                p: forward_ad.make_dual(p.detach(), u.to(p.dtype)) for p, u in direction.items()
            }
            output, tangent = forward_ad.unpack_dual(self._run(call, duals))
        return output, torch.zeros_like(output) if tangent is None else tangent

    def _difference(self, call: tuple[Any, Any], direction: Direction) -> Tensor:
        """A central difference, over a distance that balances rounding and curvature."""
        size = sum(p.detach().double().square().sum() for p in direction).sqrt()
        length = sum(u.double().square().sum() for u in direction.values()).sqrt()
        dtype = next(iter(direction)).dtype
        h = float(torch.finfo(dtype).eps ** (1 / 3) * size / length) if length > 0 else 0.0
        if h == 0.0:
            return torch.zeros_like(self._run(call, {}))
        ahead, behind = (
            self._run(call, {p: p.detach() + s * h * u.to(p.dtype) for p, u in direction.items()})
            for s in (1, -1)
        )
        return (ahead - behind) / (2 * h)


@contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """Every run draws the same dropout masks, and leaves the random state as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        yield


def _slice(tree: Any, share: tuple[int, int] | None) -> Any:
    """The first samples of every tensor that has the batch in front, detached."""
    if isinstance(tree, Tensor):
        batched = share is not None and tree.dim() and len(tree) == share[0]
        return tree.detach()[: share[1]] if share is not None and batched else tree.detach()
    if isinstance(tree, dict):
        return {key: _slice(branch, share) for key, branch in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_slice(branch, share) for branch in tree)
    return tree
