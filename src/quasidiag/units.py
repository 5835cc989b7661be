"""Which parameters of a model form the blocks of units, and which layers' calls feed them.

A weight and its bias make a block. Parameters that several layers share belong to one block, fed by all of them. A
bias row needs one weight and one bias that always occur together, so where layers share only one of the two, each
parameter gets a diagonal block of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Size, Tensor, nn

from quasidiag.blocks import DiagonalBlock, QuasiDiagonalBlock
from quasidiag.layers.base import Adapter, adapter_of, known_adapter
from quasidiag.layers.composite import BiasPart, Composite, Part
from quasidiag.sharing import BiasView, ReducedView, SampleView, reducible
from quasidiag.unitwise import UnitwiseBlock

REDUCTIONS: dict[str, type[DiagonalBlock]] = {
    "quasi-diagonal": QuasiDiagonalBlock,
    "diagonal": DiagonalBlock,
    "unitwise": UnitwiseBlock,
}


class Layer(NamedTuple):
    """A layer, or a part of a composite one, with its trained parameters."""

    name: str
    module: nn.Module
    adapter: Adapter
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    recurrent: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in (self.bias, self.weight) if p is not None]


class Units(NamedTuple):
    """The blocks of a model and how they are fed."""

    blocks: list[DiagonalBlock]
    #: The layers to watch.
    watched: dict[nn.Module, Adapter]
    #: The dense layers inside each composite layer.
    parts: dict[nn.Module, dict[str, nn.Module]]
    #: The keys under which the calls of a layer (or part) are recorded: the layer itself, or views of it.
    keys: dict[nn.Module, list[nn.Module]]
    #: The block of each key, and of each layer that has one.
    owner: dict[nn.Module, DiagonalBlock]

    def summed(self, module: nn.Module) -> bool:
        """Whether the gradients of single samples are recorded for a layer (or part): ``"exact"`` sharing."""
        return any(isinstance(key, SampleView) for key in self.keys.get(module, ()))


class _Unshifted(Adapter):
    """What a block needs of an adapter if its moments have no shift."""

    def __init__(self, inner: Adapter) -> None:
        self.inner, self.full, self.normalises = inner, inner.full, inner.normalises

    def mixes(self, module: nn.Module) -> bool:
        return self.inner.mixes(module)

    def rows(self, module: nn.Module, weight: Tensor) -> Tensor:
        return self.inner.rows(module, weight)

    def unrows(self, module: nn.Module, rows: Tensor, shape: Size) -> Tensor:
        return self.inner.unrows(module, rows, shape)


def find_units(
    model: nn.Module, trained: Iterable[Tensor], reduction: str, how: str = "expand"
) -> Units:
    """The blocks of the ``trained`` parameters, by a reduction and one of ``sharing.SHARINGS``.

    Those in no block follow the diagonal rule of :class:`quasidiag.AdaGrad`.
    """
    units = Units([], {}, {}, {}, {})
    layers = list(_layers(model, set(trained), units))
    for group in _sharing_parameters(layers):
        first = group[0]
        sharing = _of_group(group, how)
        if sharing == "reduce" and not all(reducible(layer.adapter) for layer in group):
            raise ValueError(
                f"sharing='reduce' needs Adapter.patches, which {type(first.adapter).__name__} for {first.name} "
                f"({type(first.module).__name__}) does not have: use sharing='expand' or 'exact'"
            )
        if len({(x.weight, x.bias, type(x.adapter)) for x in group}) == 1:
            block = _block(first, reduction, sharing)
            _add(units, block, group, sharing)
            continue
        for weight in _unique(x.weight for x in group):
            users = [x for x in group if x.weight is weight]
            only = users[0]._replace(weight=weight, bias=None)
            _add(units, _block(only, "diagonal", sharing), users, sharing)
        for bias in _unique(x.bias for x in group):
            users = [x for x in group if x.bias is bias]
            only = users[0]._replace(weight=None, bias=bias)
            _add(units, _block(only, "diagonal", sharing), users, sharing, bias_only=True)
    return units


def _of_group(group: list[Layer], how: str) -> str:
    """How layers that have parameters in common enter the metric."""
    if how != "recurrent":
        return how
    return "exact" if all(layer.recurrent for layer in group) else "expand"


def _layers(model: nn.Module, wanted: set[Tensor], units: Units) -> Iterable[Layer]:
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        adapter = adapter_of(module)
        if adapter is None or module in inside:
            continue
        parts: dict[str, nn.Module] = {"": module}
        if isinstance(adapter, Composite):
            parts = adapter.parts(module)
            inside |= set(module.modules())
        found = []
        for part_name, part in parts.items():
            own = known_adapter(part)
            weight, bias = _own(part, own.weight, wanted), _own(part, own.bias, wanted)
            if weight is not None or bias is not None:
                label = ".".join(filter(None, (name, part_name))) or type(module).__name__
                again = isinstance(adapter, Composite) and adapter.recurrent
                found.append(Layer(label, part, own, weight, bias, again))
        if found:
            units.watched[module] = adapter
            if isinstance(adapter, Composite):
                units.parts[module] = parts
        yield from found


def _own(module: nn.Module, name: str | None, wanted: set[Tensor]) -> nn.Parameter | None:
    parameter = getattr(module, name, None) if name else None
    return parameter if isinstance(parameter, nn.Parameter) and parameter in wanted else None


def _sharing_parameters(layers: list[Layer]) -> list[list[Layer]]:
    """The layers in groups, such that no two groups have a parameter in common."""
    group_of: dict[Tensor, list[Layer]] = {}
    groups: list[list[Layer]] = []
    for layer in layers:
        joined = [layer]
        for group in _unique(group_of.get(p) for p in layer.parameters):
            groups = [g for g in groups if g is not group]
            joined = [*group, *joined]
        groups.append(joined)
        for member in joined:
            for p in member.parameters:
                group_of[p] = joined
    return groups


def _unique(things: Iterable[Any]) -> list[Any]:
    """The things that are not ``None``, each once, by identity."""
    return list({id(x): x for x in things if x is not None}.values())


def _block(layer: Layer, reduction: str, sharing: str) -> DiagonalBlock:
    kind = REDUCTIONS[reduction]
    adapter = layer.adapter
    if kind is UnitwiseBlock and not adapter.full:
        kind = QuasiDiagonalBlock
    if layer.weight is None or (layer.bias is None and kind is QuasiDiagonalBlock):
        kind = DiagonalBlock
    if kind is UnitwiseBlock and not adapter.has_patches and sharing != "exact":
        raise ValueError(
            f"the unitwise reduction needs Adapter.patches, which {type(adapter).__name__} for {layer.name} "
            f"({type(layer.module).__name__}) does not have: use reduction='quasi-diagonal'"
        )
    # A state is small at first and grows with the weights that make it: its variance about its mean says little about how
    # far these may move, which is what safeguards are relative to.
    state = isinstance(layer.module, Part) and layer.module.state
    solver = adapter if kind is QuasiDiagonalBlock and not state else _Unshifted(adapter)
    return kind(layer.name, layer.module, solver, layer.weight, layer.bias)


def kind_of(block: DiagonalBlock, model: nn.Module) -> str:
    """The class of a block's layer; for a dense layer inside of another layer (an LSTM, say), that of the outer one."""
    if isinstance(block.module, Part | BiasPart):
        return type(model.get_submodule(block.name.rpartition(".")[0])).__name__
    return type(block.module).__name__


def _add(
    units: Units, block: DiagonalBlock, users: list[Layer], sharing: str, bias_only: bool = False
) -> None:
    units.blocks.append(block)
    samples = SampleView(block.module)
    for module in _unique(user.module for user in users):
        key = module
        if sharing == "reduce":
            key = ReducedView(key)
        if sharing == "exact":
            key = samples
        elif bias_only:
            key = BiasView(key)
        units.keys.setdefault(module, []).append(key)
        units.owner[key] = block
        units.owner.setdefault(module, block)
