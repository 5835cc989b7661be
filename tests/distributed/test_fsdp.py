"""``fully_shard`` deals out rows, a row is a unit's block, and every rank solves for its own units."""

import pytest
import torch
from problems import alone, batches, model, numbers, optimizer, part, same, train
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import quasidiag as qd

METRICS = ["loss", "outer-product", "exact"]


def shard(network: nn.Sequential, layers: bool = True, **options: object) -> nn.Sequential:
    """Rows of every layer on every rank: 7, 5 and 3 units, so that none of 2 and 4 ranks divides them evenly."""
    for layer in network if layers else ():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(network, **options)
    return network


def whole(network: nn.Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in network.parameters()])


def train_sharded(rank: int, size: int) -> dict[str, Tensor]:
    found = {}
    data = [part(b, rank, size) for b in batches()]
    for name in METRICS:
        network = shard(model())
        rule, criterion = optimizer(network, name)
        train(network, rule, data, criterion)
        found[name] = whole(network)
        for state in rule.state.values():
            for key, value in state.items():
                assert key == "updates" or isinstance(value, DTensor), key
    for reduction in ("diagonal", "unitwise"):
        network = shard(model(), layers=False)
        rule, criterion = optimizer(network, "exact", reduction=reduction, eps=1e-3)
        train(network, rule, data, criterion)
        found[reduction] = whole(network)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_equals_unsharded(size: int) -> None:
    for result in run(train_sharded, size):
        for name in METRICS:
            same(result[name], alone(name))
        for reduction in ("diagonal", "unitwise"):
            same(result[reduction], alone("exact", reduction=reduction, eps=1e-3))


def other_ways(rank: int, size: int) -> dict[str, Tensor]:
    found = {}
    network = shard(model())
    rule, criterion = optimizer(network, "exact", lr=0.002)
    train(network, rule, [part(b, rank, size) for b in batches(70)], criterion)
    found["long"] = whole(network)
    found["m0i"] = rule.moments(network[0]).m0i.full_tensor()
    for name in ("loss", "exact"):
        network = shard(model())
        rule, criterion = optimizer(network, name)
        for batch in batches():
            rule.zero_grad()
            x, t = part(batch, rank, size)
            network.set_requires_gradient_sync(False)
            (criterion(network(x[:6]), t[:6]) / 2).backward()
            network.set_requires_gradient_sync(True)
            (criterion(network(x[6:]), t[6:]) / 2).backward()
            rule.step()
        found[f"accumulated {name}"] = whole(network)
    network = shard(model())
    rule, criterion = optimizer(network, "exact")
    own = torch.optim.SGD(network.parameters(), lr=0.02)
    for batch in batches():
        rule.zero_grad()
        x, t = part(batch, rank, size)
        criterion(network(x), t).backward()
        rule.precondition_()
        own.step()
    found["precondition_"] = whole(network)
    return found


def test_long_accumulated_and_with_another_optimizer() -> None:
    lone = model()
    rule, criterion = optimizer(lone, "exact", lr=0.002)
    train(lone, rule, batches(70), criterion)
    for result in run(other_ways, 2):
        same(result["long"], numbers(lone))
        same(result["m0i"], rule.moments(lone[0]).m0i)
        same(result["accumulated loss"], alone("loss"))
        same(result["accumulated exact"], alone("exact"))
        same(result["precondition_"], alone("exact", momentum=0.0))


def shadow(rank: int, size: int) -> list[int]:
    network = shard(model())
    rule, criterion = optimizer(network, "outer-product")
    under_way = []
    for batch in batches():
        rule.zero_grad()
        x, t = part(batch, rank, size)
        criterion(network(x), t).backward()
        under_way.append(sum(len(flight.blocks) for flight in rule._exchange._flights))
        rule.step()
    return under_way


def test_moments_leave_during_the_backward_pass() -> None:
    """All four layers' from the second minibatch on; the first waits for the step."""
    for under_way in run(shadow, 2):
        assert under_way == [0] + [4] * (len(batches()) - 1)


def hybrid(rank: int, size: int) -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
    network = shard(model(), mesh=mesh)
    rule, criterion = optimizer(network, "exact")
    train(network, rule, [part(b, rank, size) for b in batches()], criterion)
    return whole(network)


def test_copies_of_shards() -> None:
    for result in run(hybrid, 4):
        same(result, alone("exact"))


def skip(rank: int, size: int) -> tuple[Tensor, Tensor]:
    network = shard(model())
    rule, criterion = optimizer(network, "outer-product")
    data = [part(b, rank, size) for b in batches()]
    train(network, rule, data[:2], criterion)
    before = whole(network)
    x, t = data[2]
    if rank == 1:
        x = x.clone()
        x[0, 0] = torch.nan
    with pytest.warns(RuntimeWarning, match="skipped"):
        train(network, rule, [(x, t)], criterion)
    return before, whole(network)


def test_all_ranks_skip_together() -> None:
    for before, after in run(skip, 2):
        assert torch.equal(before, after)


def flags(rank: int, size: int) -> tuple[bool, bool, bool]:
    network = shard(model())
    rule, criterion = optimizer(network, "exact")
    x, t = part(batches()[0], rank, size)
    loss = criterion(network(x), t)
    network.set_is_last_backward(False)
    network[0].set_reshard_after_backward(False)
    loss.backward()
    last = network._get_fsdp_state()._state_ctx.is_last_backward
    rule.close()
    return isinstance(network[0].weight, DTensor), isinstance(network[2].weight, DTensor), last


def test_what_the_user_asked_of_fully_shard_stays() -> None:
    """The metric's own backward passes reshard nothing; after them the ordinary one does as it was told."""
    for first_cut, second_cut, last in run(flags, 2):
        assert second_cut
        assert not first_cut
        assert not last


def message(network: nn.Module, **options: object) -> str:
    before = [local(p.detach()).clone() for p in network.parameters()]
    with pytest.raises(ValueError) as error:
        qd.QDOP(network, lr=0.1, **options)
    for old, new in zip(before, network.parameters()):
        assert torch.equal(old, local(new.detach()))
    return str(error.value)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def layouts(rank: int, size: int) -> dict[str, str]:
    found = {}
    mesh = init_device_mesh("cpu", (size,))
    columns = fully_shard(
        nn.Linear(6, 4), shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else Shard(0)
    )
    found["columns"] = message(columns)
    for name, placement in (("partial", Partial()), ("tensor parallel", Shard(0))):
        layer = nn.Linear(6, 4)
        layer.weight = nn.Parameter(place(layer.weight.detach(), mesh, placement))
        found[name] = message(layer)
    found["transposed"] = message(fully_shard(nn.ConvTranspose2d(4, 6, 3)))
    found["safeguard"] = message(shard(model()), safeguard=(0.1, 0.1, 0.1))
    return found


def place(x: Tensor, mesh: object, placement: Placement) -> Tensor:
    if isinstance(placement, Partial):
        return DTensor.from_local(x, mesh, [placement])
    return distribute_tensor(x, mesh, [placement])


def test_layouts_that_do_not_keep_rows_whole() -> None:
    for found in run(layouts, 2):
        assert "Shard(dim=1)" in found["columns"] and "a row is a unit's block" in found["columns"]
        assert "Partial" in found["partial"]
        assert "tensor parallelism" in found["tensor parallel"]
        assert "ConvTranspose2d" in found["transposed"]
        assert "safeguard= is not for fully_shard" in found["safeguard"]
