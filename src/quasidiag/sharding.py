"""Rows of a sharded parameter: what ``fully_shard`` leaves on each rank, and the metric that goes with it.

``fully_shard`` cuts every parameter along its first dimension. A row of a weight is a unit's block, so a rank that holds
some rows can solve for their units alone; it only needs the moments of its own rows, summed over everybody's samples.
The metric is kept as ``DTensor``, cut like its parameter, so that ``torch.distributed.checkpoint`` can save it on one
number of ranks and load it on another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quasidiag.blocks import DiagonalBlock, State
from quasidiag.moments import PLAIN


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``, found without importing ``torch.distributed.tensor``, which is slow.

    So is looking for an attribute that a plain tensor does not have: hence the look at the type first.
    """
    return type(tensor) not in PLAIN and hasattr(tensor, "placements")


def local(tensor: Any) -> Any:
    """This rank's part of a tensor, sharing its memory; of a plain tensor, itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(value: Tensor, parameter: Any) -> Tensor:
    """This rank's ``value`` as part of a ``DTensor`` that is cut along its first dimension like ``parameter``."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor

    shape = torch.Size([parameter.shape[0], *value.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def everywhere(value: Tensor, parameter: Any) -> Tensor:
    """A ``value`` that is the same on all ranks, as a replicated ``DTensor``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


class Entry(MutableMapping[str, Any]):
    """One parameter's state as this rank's rows see it: writes go through to the sharded state."""

    def __init__(self, whole: MutableMapping[str, Any], parameter: Tensor) -> None:
        self._whole, self._parameter = whole, parameter

    def __getitem__(self, key: str) -> Any:
        return local(self._whole[key])

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            # The shift is a point in the layer's inputs, one for all units.
            value = (everywhere if key == "shift" else like)(value, self._parameter)
        self._whole[key] = value

    def __delitem__(self, key: str) -> None:
        del self._whole[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


class LocalState(Mapping[Tensor, Any]):
    """The optimizer's state for this rank's rows; its keys are the local parts of the parameters."""

    def __init__(self, state: State, whole: dict[Tensor, Tensor]) -> None:
        self._state, self._whole = state, whole

    def __getitem__(self, part: Tensor) -> Any:
        parameter = self._whole[part]
        return Entry(self._state[parameter], parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def rows_of(block: DiagonalBlock, state: State) -> tuple[DiagonalBlock, State]:
    """A block of only those units whose rows this rank holds, and the state to call its methods with."""
    if not is_sharded(block.home):
        return block, state
    mine = copy.copy(block)
    parts = {p: local(p.detach()) for p in block.parameters}
    mine.weight = None if block.weight is None else parts[block.weight]
    mine.bias = None if block.bias is None else parts[block.bias]
    mine.parameters = [parts[p] for p in block.parameters]
    mine.home = parts[block.home]
    mine.add_up = _add_up(block.home)
    return mine, LocalState(state, {part: p for p, part in parts.items()})


def _add_up(parameter: Any) -> Callable[[Tensor], Tensor]:
    """A function that turns a sum over one rank's rows into the sum over all rows."""

    def add_up(x: Tensor) -> Tensor:
        for i, placement in enumerate(parameter.placements):
            if placement.is_shard():
                dist.all_reduce(x, group=parameter.device_mesh.get_group(i))
        return x

    return add_up


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """A context for backward passes before the ordinary one: weights are gathered once for all, no gradient is reduced."""
    if not any(map(is_sharded, model.parameters())):
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    roots = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [_flags(root) for root in roots]
    for root in roots:
        root.set_is_last_backward(False)
        root.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for root, (last, reshard) in zip(roots, before):
            root.set_is_last_backward(last)
            root.set_reshard_after_backward(reshard, recurse=False)


def _flags(root: Any) -> tuple[bool, bool]:
    """Whether the next backward pass is the last one, and whether it reshards: FSDP has public names to set them only."""
    state = root._get_fsdp_state()
    # In older torch a module has one group of parameters at most, and not a list; one without any reshards nothing.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    reshard = all(group.reshard_after_backward for group in groups if group is not None)
    return state._state_ctx.is_last_backward, reshard


def check_layout(name: str, parameter: Any) -> None:
    """Raise unless the parameter is whole, or cut along its first dimension."""
    if not is_sharded(parameter):
        return
    cuts = [p for p in parameter.placements if not p.is_replicate()]
    if len(cuts) > 1 or any(not p.is_shard(0) or type(p).__name__ != "Shard" for p in cuts):
        raise ValueError(
            f"{name} has the layout {tuple(parameter.placements)}, and quasidiag needs whole rows, because a row is a "
            "unit's block: shard along the first dimension, as fully_shard does by default"
        )


def check_model(model: nn.Module, blocks: list[DiagonalBlock]) -> None:
    """Raise for every layout in which a rank could not solve for its units alone."""
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        check_layout(name, parameter)
    if not any(map(is_sharded, named.values())):
        return
    from torch.distributed.fsdp import FSDPModule

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "the model has DTensor parameters but no fully_shard: quasidiag covers data parallelism (DDP and "
            "fully_shard), not tensor parallelism"
        )
    for block in blocks:
        if len({is_sharded(p) for p in block.parameters}) > 1:
            raise ValueError(f"{block.name} has a sharded and an unsharded parameter: shard both")
        if is_sharded(block.home) and block.safeguard is not None:
            raise ValueError(
                f"safeguard= is not for fully_shard: it goes by the mean over a layer's units, and each rank has only some "
                f"of those of {block.name}. Use safeguard=None and an eps, or DDP"
            )
        if is_sharded(block.home) and type(block) is not DiagonalBlock and not _units_first(block):
            raise ValueError(
                f"the units of {block.name} ({type(block.module).__name__}) do not lie along its weight's first dimension, "
                "where fully_shard cuts it: leave it out of fully_shard, or use reduction='diagonal'"
            )


def _units_first(block: DiagonalBlock) -> bool:
    """Whether row *k* of the weight is the block of unit *k*, asked of the adapter itself."""
    assert block.weight is not None
    shape = block.weight.shape
    index = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    rows = block.adapter.rows(block.module, index)
    return rows.shape[0] == shape[0] and bool((rows == torch.arange(shape[0]).unsqueeze(1)).all())
