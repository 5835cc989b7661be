r"""Layers that hide several dense layers within one call: recurrent nets, attention.

Their kernels show neither the inner activities nor the inner pre-activations. So the layer is *re-run*: when the
output's derivative is known, its forward pass is computed once more from the recorded arguments, with every dense layer
in it visible, and backpropagation through that gives :math:`(a, δ)` of each of these *parts*. A part is an ordinary
:class:`torch.nn.Linear` that holds the layer's own parameters, so everything else (blocks, reductions, weight sharing)
treats it like any dense layer.

The price is one forward and one backward pass through the layer per minibatch, without weight gradients; per
vector of the exact or Monte Carlo metric it is one more backward. Dropout within the layer is repeated from the random
state of the first run; where a kernel draws its masks elsewhere (cuDNN), the re-run does not reproduce the recorded
output, and an error is raised.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import random as python
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quasidiag.layers.base import Adapter, register_layer


class Call(NamedTuple):
    """A dense layer as it was applied: activity ``[N, S, inputs]`` and derivative ``[N, S, units]``."""

    module: nn.Module
    a: Tensor
    delta: Tensor


class Part(nn.Linear):
    """A dense layer made of parameters that belong to another module.

    ``state`` says whether its inputs are what the module hands on to itself, from one time step to the next.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, state: bool = False
    ) -> None:
        nn.Module.__init__(self)
        self.state = state
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)


class BiasPart(nn.Module):
    """A bias that belongs to another module, where several weights share it."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias


@register_layer(BiasPart)
class BiasPartAdapter(Adapter):
    """The adapter of a bias without a weight."""

    weight = ""

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return a.unsqueeze(2), g.unsqueeze(2)


class Tape:
    """Records the dense layers applied in a re-run, to find the derivatives of their pre-activations."""

    def __init__(self) -> None:
        self._applied: list[tuple[nn.Module, slice, Tensor, Tensor]] = []

    def linear(self, part: nn.Module, a: Tensor, rows: slice = slice(None)) -> Tensor:
        """``F.linear`` with a part (or some rows of it) on inputs with the batch first."""
        assert isinstance(part, nn.Linear)
        bias = None if part.bias is None else _whole(part.bias)[rows]
        z = F.linear(a, _whole(part.weight)[rows], bias)
        if not z.requires_grad:
            z.requires_grad_()
        self._applied.append((part, rows, a.detach(), z))
        return z

    def bias(self, part: nn.Module, z: Tensor, rows: slice) -> Tensor:
        """Add some rows of a bias to pre-activations with the batch first."""
        assert isinstance(part, BiasPart)
        z = z + _whole(part.bias)[rows]
        self._applied.append((part, rows, z.detach()[..., :0], z))
        return z

    def calls(self, outputs: list[Tensor], deltas: list[Tensor]) -> list[Call]:
        """Every part's activity and derivative, given the derivatives of the outputs."""
        found = torch.autograd.grad(
            outputs, [z for *_, z in self._applied], deltas, retain_graph=True, allow_unused=True
        )
        parts: dict[nn.Module, tuple[list[Tensor], list[Tensor]]] = {}
        for (part, rows, a, _), delta in zip(self._applied, found):
            if delta is None:
                continue
            if rows != slice(None):
                units = len(part.bias if isinstance(part, BiasPart) else part.weight)  # type: ignore[arg-type]
                whole = delta.new_zeros(*delta.shape[:-1], units)
                whole[..., rows] = delta
                delta = whole
            activities, derivatives = parts.setdefault(part, ([], []))
            activities.append(a.unsqueeze(1) if a.dim() == 2 else a)
            derivatives.append(delta.unsqueeze(1) if delta.dim() == 2 else delta)
        return [Call(part, torch.cat(a, 1), torch.cat(d, 1)) for part, (a, d) in parts.items()]


class Composite(Adapter, ABC):
    """An adapter for a layer with several dense layers inside; a subclass says which, and how to re-run the layer."""

    #: A composite has no weight or bias of its own: its :meth:`parts` have.
    weight = ""
    bias = None
    #: Whether it is applied to its own output, again and again.
    recurrent = False

    @abstractmethod
    def parts(self, module: nn.Module) -> dict[str, nn.Module]:
        """The dense layers inside, by name. Parameters that are in none of them follow the diagonal rule."""

    @abstractmethod
    def outputs(self, module: nn.Module, output: Any) -> list[Tensor]:
        """The tensors among the layer's output that a loss may depend on."""

    @abstractmethod
    def layout(self, module: nn.Module, args: dict[str, Any]) -> tuple[int, int | None]:
        """How many samples there are and, if the batch is the second dimension, the length of the first."""

    @abstractmethod
    def rerun(
        self, module: nn.Module, parts: dict[str, nn.Module], args: dict[str, Any], tape: Tape
    ) -> list[Tensor]:
        """Compute :meth:`outputs` from the arguments of ``forward``, using ``tape.linear`` for every part.

        ``args["one_node"]`` says whether all outputs came from one node of the graph (a fused kernel).
        """

    def random(self, module: nn.Module) -> bool:
        """Whether the forward pass draws random numbers."""
        return False


class Surroundings:
    """What a forward pass depends on besides its arguments: random state and autocast.

    ``foreign`` includes the generators of Python and numpy, which only the user's code draws from.
    """

    def __init__(self, device: torch.device, random: bool, foreign: bool = False) -> None:
        self.kind = device.type
        self.devices = [device] if self.kind == "cuda" and random else []
        self.cpu = torch.get_rng_state() if random else None
        self.cuda = [torch.cuda.get_rng_state(d) for d in self.devices]
        self.foreign = _foreign() if foreign else []
        self.autocast = torch.is_autocast_enabled(self.kind)
        self.dtype = torch.get_autocast_dtype(self.kind)

    def drew(self) -> bool:
        """Whether Python's or numpy's generator was used since; one that was not is forgotten, as it need not be reset."""
        pairs = zip(self.foreign, _foreign()) if self.foreign else ()
        self.foreign = [a for a, b in pairs if pickle.dumps(a[1]) != pickle.dumps(b[1])]
        return bool(self.foreign)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context with gradients enabled in which random state and autocast are as they were."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self.autocast or torch.is_autocast_enabled(self.kind):
                autocast = torch.autocast(self.kind, self.dtype, enabled=self.autocast)
                stack.enter_context(autocast)
            if self.cpu is not None:
                stack.callback(torch.set_rng_state, torch.get_rng_state())
                torch.set_rng_state(self.cpu)
                for device, state in zip(self.devices, self.cuda):
                    stack.callback(
                        torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device
                    )
                    torch.cuda.set_rng_state(state, device)
            if self.foreign:
                for put_back, now in _foreign():
                    stack.callback(put_back, now)
                for put_back, then in self.foreign:
                    put_back(then)
            yield


def _foreign() -> list[tuple[Callable[[Any], None], Any]]:
    """The functions that set Python's and (if it was imported) numpy's generator, with the generators' states."""
    found: list[tuple[Callable[[Any], None], Any]] = [(python.setstate, python.getstate())]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append((numpy.set_state, numpy.get_state(legacy=False)))
    return found


class Rerun:
    """A recorded call of a composite layer. The first :meth:`calls` re-runs it, once for all vectors."""

    def __init__(
        self,
        adapter: Composite,
        module: nn.Module,
        parts: dict[str, nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
        surroundings: Surroundings,
    ) -> None:
        memo: dict[int, Tensor] = {}  # one tensor given twice stays one
        given = arguments(module, args, kwargs)
        self._args = {name: _detach(value, memo) for name, value in given.items()}
        self._args["one_node"] = len({y.grad_fn for y in outputs}) == 1
        #: The number of samples and, if the batch is the second dimension, the length of the first (else ``None``).
        self._samples, self.batch_second = adapter.layout(module, self._args)
        self._live = [y.requires_grad for y in outputs]
        self._adapter, self._module, self._parts = adapter, module, parts
        self._surroundings = surroundings
        self._check = [y.detach() for y in outputs] if surroundings.cpu is not None else []
        self._done: tuple[Tape, list[Tensor]] | None = None

    def __len__(self) -> int:
        return self._samples

    def calls(self, deltas: Sequence[Tensor | None]) -> list[Call]:
        """The parts as they were applied, given the derivative (or ``None``) of each output that requires one."""
        if self._done is None:
            tape = Tape()
            with self._surroundings.again():
                outputs = self._adapter.rerun(self._module, self._parts, self._args, tape)
            self._done = tape, outputs
            self._verify(outputs)
        tape, outputs = self._done
        live = [y for y, alive in zip(outputs, self._live) if alive]
        known = [(y, delta) for y, delta in zip(live, deltas) if delta is not None]
        return tape.calls([y for y, _ in known], [d.to(y.dtype) for y, d in known])

    def _verify(self, outputs: list[Tensor]) -> None:
        for now, then in zip(outputs, self._check):
            scale = float(then.abs().max()) or 1.0
            if (
                float((now.detach() - then).abs().max())
                > scale * torch.finfo(then.dtype).eps ** 0.5
            ):
                raise RuntimeError(
                    f"the dropout inside {type(self._module).__name__} could not be repeated, so its metric cannot be "
                    "had: set its dropout to 0 and put nn.Dropout around it"
                )


def _whole(parameter: Tensor) -> Tensor:
    """The parameter, gathered from all ranks where ``fully_shard`` has cut it."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter.detach() if gather is None else gather().detach()


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward pass by name, in order, defaults included."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _detach(value: Any, memo: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return memo.setdefault(id(value), value.detach())
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return value._replace(data=value.data.detach())
    if isinstance(value, tuple):
        return tuple(_detach(x, memo) for x in value)
    return value
