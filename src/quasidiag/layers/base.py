r"""The :class:`Adapter`, which says how a layer forms its parameter gradients, and the registry of adapters.

The moments of a layer are its own parameter gradients, taken at the inputs ``a`` and ``a²`` with the weights
:math:`w = δ^2` in the place of the output's gradient:

.. math:: m_{00} = \text{bias\_grad}(w), \quad m_{0i} = \text{weight\_grad}(a, w), \quad
          m_{ii} = \text{weight\_grad}(a^2, w).

So an adapter says how a gradient is formed, and the rest follows. Arrays keep the batch first; whatever lies between
the batch and the features (time, space) is *shared*: by default every position counts as one more occurrence of the
unit (:mod:`quasidiag.sharing` has the other two ways).

Where occurrences are needed one by one, :meth:`Adapter.patches` brings a layer to its general form: groups of units,
each a dense layer applied at every position. With ``N`` samples, ``S`` positions, ``G`` groups of ``U`` units and ``I``
inputs a unit, activities are ``[N, S, G, I]`` and gradients ``[N, S, G, U]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quasidiag.moments import Moments


class Adapter:
    """Says how one kind of layer forms the gradients of its weight and bias. To teach a new layer, subclass and register it.

    Only :meth:`weight_grad` must be defined. :meth:`bias_grad`, :meth:`rows` and :meth:`unrows` default to those of a
    dense layer; :meth:`patches` is needed for the unitwise reduction and ``sharing="reduce"``.
    """

    #: Names of the parameters that form the units' blocks. A missing or frozen one is left out.
    weight: str = "weight"
    bias: str | None = "bias"
    #: Whether the inputs of all units can be shifted by one vector (``shift`` in ``reductions.quasi_diagonal``).
    shiftable: bool = False
    #: Whether a unit's full block holds more than its diagonal and bias row.
    full: bool = True
    #: Whether the layer normalises its input, so that it hardly matters how large the weights before it are.
    normalises: bool = False

    def activity(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor:
        """The input that the weights multiply, with the batch first."""
        return args[0]

    def square(self, a: Tensor) -> Tensor:
        """The squared activity. Override it if :meth:`activity` returns something that stands for it (token numbers)."""
        return a.square()

    def weight_grad(self, module: nn.Module, a: Tensor, g: Tensor) -> Tensor:
        """The gradient of the weight for the activity ``a`` and the output's gradient ``g``, summed over the batch."""
        raise TypeError(f"{type(self).__name__} does not say how its weight's gradient is formed")

    def bias_grad(self, module: nn.Module, g: Tensor) -> Tensor:
        """The gradient of the bias, one number for each unit, summed over the batch."""
        return g.reshape(-1, g.shape[-1]).sum(0)

    def mixes(self, module: nn.Module) -> bool:
        """Whether all units see the same inputs, so that the rows form one matrix (:mod:`quasidiag.auto.orthogonal`)."""
        return False

    def rows(self, module: nn.Module, weight: Tensor) -> Tensor:
        """The weight (or anything of its shape) as ``[units, inputs]``; a view wherever one exists."""
        return weight.flatten(1)

    def unrows(self, module: nn.Module, rows: Tensor, shape: torch.Size) -> Tensor:
        """Back from ``[units, inputs]`` to the weight's own shape."""
        return rows.reshape(shape)

    def patches(self, module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Activities ``[N, S, G, I]`` and gradients ``[N, S, G, U]`` of every occurrence of every unit, see the module."""
        raise TypeError(f"{type(self).__name__} does not say what its units see at each position")

    @property
    def has_patches(self) -> bool:
        """Whether the adapter defines :meth:`patches`."""
        return type(self).patches is not Adapter.patches

    def full_block(self, module: nn.Module, a: Tensor, w: Tensor, bias: bool) -> Tensor:
        r""":math:`\sum w\, \tilde a \tilde a^⊤` of every unit, ``[units, n, n]``; with a ``bias``, it comes first."""
        inputs, units = (x.flatten(0, 1) for x in self.patches(module, a, w))
        if bias:
            inputs = torch.cat([torch.ones_like(inputs[..., :1]), inputs], dim=-1)
        return torch.einsum("ngu,ngi,ngj->guij", units, inputs, inputs).flatten(0, 1)

    def accumulate_(
        self, module: nn.Module, into: Moments, a: Tensor, w: Tensor, keep: float, gain: float
    ) -> None:
        """``into ← keep·into + gain·moments(a, w)``, for those of the three moments that are not ``None``."""
        if into.m00 is not None:
            into.m00.mul_(keep).add_(self.bias_grad(module, w), alpha=gain)
        if into.m0i is not None:
            into.m0i.mul_(keep).add_(self.weight_grad(module, a, w), alpha=gain)
        if into.mii is not None:
            into.mii.mul_(keep).add_(self.weight_grad(module, self.square(a), w), alpha=gain)


_registry: dict[type[nn.Module] | str, Adapter] = {}


def register_layer(*kinds: type[nn.Module] | str) -> Callable[[type[Adapter]], type[Adapter]]:
    """Class decorator: use this :class:`Adapter` for the module classes ``kinds`` and their subclasses.

    A class of a package that need not be installed is given by its full name, ``"package.module.Class"``.
    """

    def register(adapter: type[Adapter]) -> type[Adapter]:
        for kind in kinds:
            _registry[kind] = adapter()
        return adapter

    return register


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter registered for the module's class or the nearest of its bases, if any."""
    for kind in type(module).__mro__:
        found = _registry.get(kind) or _registry.get(f"{kind.__module__}.{kind.__qualname__}")
        if found is not None:
            return found
    return None


def known_adapter(module: nn.Module) -> Adapter:
    """The adapter of a module that is known to have one."""
    adapter = adapter_of(module)
    assert adapter is not None
    return adapter


def in_dtype_of(delta: Tensor, a: Tensor) -> Tensor:
    """Activities in the dtype of the derivatives; class numbers as they are."""
    return a.to(delta.dtype) if a.is_floating_point() else a


def need_batch(module: nn.Module, a: Tensor, dims: int) -> Tensor:
    """Return ``a``, or raise if it has fewer than ``dims`` dimensions, the batch dimension included."""
    if a.dim() < dims:
        raise ValueError(
            f"{type(module).__name__} was given an input of shape {tuple(a.shape)}, without a batch dimension, so "
            "quasidiag cannot tell its samples apart: add one with x.unsqueeze(0)"
        )
    return a
