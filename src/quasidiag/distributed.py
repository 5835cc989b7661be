r"""Several ranks: one metric of the samples of all ranks.

The moments are sums over samples, so those of all ranks add up. :class:`Exchange` keeps each rank's sums of the minibatch
and sends them while the backward pass still runs, as DDP does with gradients: a layer's moments are complete when its
weight's gradient is, and are sent in buckets. Where parameters are whole (DDP) a bucket is all-reduced; where
``fully_shard`` has cut them into rows, a reduce-scatter gives every rank the moments of its own units.

With *N* ranks and *B* samples each, the result is that of one rank with *N·B* samples.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quasidiag.blocks import DiagonalBlock, State
from quasidiag.probe import Hook
from quasidiag.sharding import check_model, is_sharded, local, rows_of
from quasidiag.sums import SUMS

Room = dict[Tensor, dict[str, Any]]

#: A bucket is full when it has more than this many bytes (DDP's own default).
BUCKET_BYTES = 25 * 2**20


class Layout(NamedTuple):
    """How a block lies on the ranks: those in ``shard`` hold pieces of its rows, those in ``replicas`` hold copies."""

    shard: Any
    replicas: Any
    dtype: torch.dtype
    device: torch.device

    @property
    def pieces(self) -> int:
        return 1 if self.shard is None else dist.get_world_size(self.shard)


class Flight(NamedTuple):
    """A bucket being sent: ``work`` fills ``result``; ``sent`` must live until that is done."""

    blocks: list[DiagonalBlock]
    work: Any
    result: Tensor
    sent: Tensor
    layout: Layout


class Outcome(NamedTuple):
    """What the ranks agreed on before a step: whether any minibatch is bad, and which blocks any rank has used."""

    bad: bool
    #: The number of samples per rank, averaged over ranks.
    total: float
    #: The number of backward passes, averaged over those ranks that had any.
    passes: int
    seen: set[DiagonalBlock]


def connect(
    model: nn.Module,
    blocks: list[DiagonalBlock],
    owner: dict[nn.Module, DiagonalBlock],
    state: Callable[[], State],
    process_group: Any = "auto",
    criterion: nn.Module | None = None,
) -> Exchange | None:
    """The exchange with the other ranks, or ``None`` where there are none."""
    check_model(model, blocks)
    group = find_group(model, process_group)
    if group is None or dist.get_world_size(group) == 1:
        sharded = [block.name for block in blocks if is_sharded(block.home)]
        if sharded and process_group is None:
            raise ValueError(f"{sharded[0]} is sharded: process_group=None makes no sense for it")
        if not sharded:
            return None
    known = set(model.parameters())
    strays = [] if criterion is None else [p for p in criterion.parameters() if p not in known]
    return Exchange(model, blocks, owner, state, group, strays)


def find_group(model: nn.Module, process_group: Any) -> Any:
    """The process group; ``"auto"`` is that of DDP or ``fully_shard``, or all ranks, or ``None`` without other ranks."""
    if process_group != "auto":
        return process_group
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    sharded: Any = next((p for p in model.parameters() if is_sharded(p)), None)
    if sharded is None:
        return dist.group.WORLD
    mesh = sharded.device_mesh
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


class Exchange:
    """Sums the minibatch's moments over the ranks of ``group``, during the backward pass.

    Args:
        model: the model, wrapped in ``DistributedDataParallel`` or not.
        blocks: the model's blocks.
        owner: the block that each layer feeds.
        state: returns the optimizer's state.
        group: the ranks that train the model together.
        strays: parameters outside the model (a criterion's own), whose gradients DDP does not average.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[DiagonalBlock],
        owner: dict[nn.Module, DiagonalBlock],
        state: Callable[[], State],
        group: Any,
        strays: list[nn.Parameter],
    ) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._blocks, self._owner, self._state, self._strays = blocks, owner, state, strays
        self._agreed: set[DiagonalBlock] = set()
        self._weights: list[Tensor] = []
        self._rooms: dict[DiagonalBlock, Room] = {}
        self._seen: set[DiagonalBlock] = set()
        self._complete: set[DiagonalBlock] = set()
        self._flights: list[Flight] = []
        self._next = 0
        self._fired = False
        self._checked = False
        self._late = False
        self._layouts = {block: self._layout(block) for block in blocks}
        self._buckets = list(self._fill())
        self._of: dict[Tensor, DiagonalBlock] = {block.home: block for block in blocks}
        self._handles: list[Any] = [
            block.home.register_post_accumulate_grad_hook(Hook(self._arrived)) for block in blocks
        ]
        # If some layers run on some ranks only, the order of DDP's buckets differs between ranks: do not interleave ours.
        self._overlap = not getattr(model, "find_unused_parameters", False)
        self._sync = True
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._handles.append(model.register_forward_pre_hook(Hook(self._called)))

    def _layout(self, block: DiagonalBlock) -> Layout:
        home: Any = block.home
        dtype = torch.promote_types(home.dtype, torch.float32)
        if not is_sharded(home):
            return Layout(None, self.group, dtype, home.device)
        shard, replicas = None, None
        for i, placement in enumerate(home.placements):
            if placement.is_replicate():
                replicas = home.device_mesh.get_group(i)
            else:
                shard = home.device_mesh.get_group(i)
        return Layout(shard, replicas, dtype, home.device)

    def _fill(self) -> Iterator[list[DiagonalBlock]]:
        """Buckets in the order in which the backward pass meets the blocks, the last layer first."""
        bucket: list[DiagonalBlock] = []
        size = 0
        for block in reversed(self._blocks):
            numbers = 2 * sum(p.numel() for p in block.parameters)
            if bucket and (size > BUCKET_BYTES or self._layouts[block] != self._layouts[bucket[0]]):
                yield bucket
                bucket, size = [], 0
            bucket.append(block)
            size += numbers * self._layouts[block].dtype.itemsize
        if bucket:
            yield bucket

    def _called(self, model: Any, args: Any) -> None:
        """At a forward pass: note whether DDP will synchronise gradients in its backward pass."""
        self._sync = model.require_backward_grad_sync

    def started(self, block: DiagonalBlock) -> bool:
        """Whether the block has a metric yet; the same on all ranks."""
        return "updates" in self._state().get(block.home, {})

    def take(self, module: nn.Module, a: Tensor, w: Tensor) -> bool:
        """Add a record's moments to this rank's sums of the minibatch; ``False`` if its block has no metric yet.

        A block's first moments wait for the step, where the ranks agree on their shift.
        """
        block = self._owner[module]
        self._seen.add(block)
        if not self.started(block):
            return False
        room = self._rooms.get(block)
        if room is None:
            room = self._rooms[block] = self._room(block)
        self._weights.append(w.sum())
        block.accumulate_(room, module, a, w.to(self._layouts[block].dtype), 1.0, 1.0)
        return True

    def _room(self, block: DiagonalBlock) -> Room:
        """Zeros for the sums of all units of a block, whichever rank holds their rows."""
        room: Room = {}
        for parameter in block.parameters:
            room[parameter] = kept = {}
            for key, value in self._state()[parameter].items():
                if key in SUMS:
                    kept[key] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
                elif key == "shift":
                    kept[key] = local(value)
        return room

    def _arrived(self, parameter: Tensor) -> None:
        """When a weight's gradient is complete, so are its block's moments: send full buckets, in one order on all ranks."""
        block = self._of[parameter]
        if not self._sync or block not in self._rooms:
            return
        self._fired = True
        self._complete.add(block)
        while self._overlap and self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if any(self.started(b) and b not in self._complete for b in bucket):
                break
            self._launch(bucket)
            self._next += 1

    def end_pass(self) -> None:
        """At the end of the backward pass: send the remaining buckets (some of their layers were not used on this rank)."""
        if self._overlap and self._fired and self._sync:
            self._launch_rest()
        self._fired = False

    def _launch_rest(self) -> None:
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._next = 0
        self._complete.clear()

    def _launch(self, bucket: list[DiagonalBlock]) -> None:
        blocks = [block for block in bucket if self.started(block)]
        if not blocks:
            return
        layout = self._layouts[blocks[0]]
        parts: list[Tensor] = []
        for block in blocks:
            room = self._rooms.pop(block, None) or self._room(block)
            parts += [_cut(x, layout.pieces) for x in _sums(room)]
        sent = torch.cat(parts, dim=1)
        if layout.shard is None:
            result = sent.view(-1)
            work = dist.all_reduce(result, group=layout.replicas, async_op=True)
        else:
            result = torch.empty_like(sent[0])
            work = _reduce_scatter()(result, sent.view(-1), group=layout.shard, async_op=True)
        self._flights.append(Flight(blocks, work, result, sent, layout))

    def meet(
        self,
        bad: bool | Tensor | None,
        total: int | float | Tensor,
        passes: int,
        alike: bool,
        device: torch.device,
    ) -> Outcome:
        """Before a step, let the ranks agree: is any minibatch bad, how many samples are there, which blocks were used.

        If ``alike``, all of them raise unless those that had any backward pass had equally many.
        """
        self._check(device)
        if bad is not None and self._weights:
            bad = bad | ~torch.stack([w.double() for w in self._weights]).isfinite().all()
        mine = [float(block in self._seen) for block in self._blocks]
        left = float(bool(self._rooms) or self._next > 0)
        powers = [float(passes**k) for k in (1, 2)]
        numbers = torch.tensor(
            [0.0, 0.0, left, float(passes > 0), *powers, *mine], dtype=torch.float64, device=device
        )
        numbers[0], numbers[1] = 0.0 if bad is None else bad, total
        dist.all_reduce(numbers, group=self.group)
        worst, count, late, some, once, twice, *seen = numbers.tolist()
        # They had equally many if the mean of the squares is the square of the mean. What each rank's sums should be
        # multiplied by else is not known in time: they may be on their way before its last pass.
        if alike and not worst and some * twice != once**2:
            raise RuntimeError(
                f"the ranks had different numbers of backward passes before this step, and this one had {passes}: without a "
                "criterion, a mean loss is taken to be divided by their number, which must be the same everywhere. Or give "
                "the optimizer a criterion, or use loss_reduction='sum'"
            )
        self._late = late > 0
        self._agreed = set(itertools.compress(self._blocks, seen))
        return Outcome(worst > 0, count / self.size, round(once / max(some, 1.0)), self._agreed)

    def _check(self, device: torch.device) -> None:
        """Once: raise unless all ranks have equally many blocks and parameters."""
        if self._checked:
            return
        size = sum(p.numel() for block in self._blocks for p in block.parameters)
        pair = torch.tensor([len(self._blocks), size], dtype=torch.float64, device=device)
        extremes = torch.cat([pair, -pair])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        if not torch.equal(extremes[:2], -extremes[2:]):
            raise RuntimeError(
                "the ranks do not train the same model: pass process_group=None for models that have nothing to do with "
                "each other, or the group of the ranks that share one"
            )
        self._checked = True

    def update(
        self,
        records: Sequence[tuple[nn.Module, Tensor, Tensor]],
        factor: float | Tensor,
        gamma: Callable[[DiagonalBlock], float],
        identity: bool,
    ) -> None:
        r""":math:`M ← (1-γ) M + γ · \text{factor} · M_b`, with :math:`M_b` the mean over ranks, for this rank's rows."""
        seen = self._agreed
        new = [block for block in self._blocks if block in seen and not self.started(block)]
        first = {self._owner[module]: a for module, a, _ in reversed(records)}
        for block, a in zip(new, self._centres(new, first)):
            rows, state = rows_of(block, self._state())
            rows.start(state, a, self._layouts[block].dtype, identity)
        for record in records:
            self.take(*record)
        if self._next:
            self._launch_rest()
        if new or self._late:
            self._launch_rest()
        for block, sums in self._land().items():
            if block not in seen:
                continue
            weight = gamma(block)
            rows, state = rows_of(block, self._state())
            for kept, fresh in zip(_sums({p: state[p] for p in rows.parameters}), sums):
                kept.mul_(1.0 - weight).add_(fresh * (factor / self.size), alpha=weight)
            rows.finish_update(state)

    def _centres(
        self, new: list[DiagonalBlock], first: dict[DiagonalBlock, Tensor]
    ) -> Iterator[Tensor]:
        """For each new block the mean activity ``[1, inputs]`` of all ranks' first minibatches, its first shift."""
        sums: list[Tensor] = []
        for block in new:
            assert block.weight is not None or not block.adapter.shiftable
            inputs = block.weight.shape[-1] if block.adapter.shiftable else 0  # type: ignore[union-attr]
            total = torch.zeros(inputs + 1, dtype=torch.float64, device=block.home.device)
            if inputs and block in first:
                a = first[block].flatten(0, -2)
                total[:-1], total[-1] = a.sum(0, dtype=torch.float64), a.shape[0]
            sums.append(total)
        if sums:
            flat = torch.cat(sums)
            dist.all_reduce(flat, group=self.group)
            sums = list(flat.split([len(x) for x in sums]))
        return ((x[:-1] / x[-1].clamp_min(1.0)).unsqueeze(0) for x in sums)

    def _land(self) -> dict[DiagonalBlock, list[Tensor]]:
        """Wait for all buckets; returns each block's sums over the ranks, for this rank's rows."""
        landed: dict[DiagonalBlock, list[Tensor]] = {}
        for blocks, work, result, _, layout in self._flights:
            work.wait()
            if layout.shard is not None and layout.replicas is not None:
                dist.all_reduce(result, group=layout.replicas)
            at = 0
            for block in blocks:
                rows, state = rows_of(block, self._state())
                found: list[Tensor] = []
                for parameter, part in zip(block.parameters, rows.parameters):
                    for kept in _sums({part: state[part]}):
                        found.append(result[at : at + kept.numel()].view(kept.shape))
                        at += -(-parameter.shape[0] // layout.pieces) * math.prod(kept.shape[1:])
                if block in landed:
                    found = [x + y for x, y in zip(found, landed[block])]
                landed[block] = found
        self._flights.clear()
        return landed

    def average_strays_(self) -> None:
        """Average over ranks the gradients of parameters outside the model, which DDP does not synchronise."""
        for parameter in self._strays:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad.div_(self.size)

    def seed(self, seed: int, step: int) -> int:
        """The seed of this rank's draws in this step: another one on each rank, and the same when the job resumes."""
        digest = hashlib.blake2b(repr((seed, step, self.rank)).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big")

    def clear(self) -> None:
        """Forget the minibatch, after waiting for buckets that are being sent."""
        for flight in self._flights:
            flight.work.wait()
        self._flights.clear()
        self._rooms.clear()
        self._weights.clear()
        self._seen.clear()
        self._complete.clear()
        self._next, self._fired, self._late = 0, False, False

    def close(self) -> None:
        """Remove all hooks."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def share(samples: int, group: Any = None) -> float:
    r"""This rank's part of the samples, times the number of ranks: :math:`n_r N / \sum_r n_r`.

    DDP and ``fully_shard`` average the ranks' gradients whatever their batch sizes. Where those differ, multiply the loss
    of each rank by its share, and the average is that of all samples.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 1.0
    return samples / float(mean(torch.tensor(float(samples), dtype=torch.float64), group))


def size(group: Any) -> int:
    """The number of ranks in ``group``; 1 if it is ``None``."""
    return 1 if group is None else dist.get_world_size(group)


def mean(numbers: Tensor, group: Any = None) -> Tensor:
    """The mean over ranks of a few numbers, sent from the kind of device that the group's backend needs."""
    there = numbers.to("cuda" if dist.get_backend(group) == "nccl" else "cpu", copy=True)
    dist.all_reduce(there, group=group)
    return (there / dist.get_world_size(group)).to(numbers.device)


def _reduce_scatter() -> Callable[..., Any]:
    """``reduce_scatter_tensor``, under its new name where torch has one."""
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _sums(room: Any) -> list[Tensor]:
    return [kept[key] for kept in room.values() for key in SUMS if key in kept]


def _cut(x: Tensor, pieces: int) -> Tensor:
    """``[pieces, ...]``: the rows as ``torch.chunk`` deals them out, each piece padded to the size of the first."""
    rows = -(-x.shape[0] // pieces)
    flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    padding = rows * pieces - x.shape[0]
    if padding:
        flat = torch.cat([flat, flat.new_zeros(padding, flat.shape[1])])
    return flat.reshape(pieces, -1)
