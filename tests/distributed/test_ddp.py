"""N ranks with B samples each go the way of one rank with N·B."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from problems import STEPS, alone, batches, model, numbers, optimizer, part, same, train
from ranks import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import quasidiag as qd
from quasidiag.distributed import share

METRICS = ["loss", "outer-product", "exact"]
REDUCTIONS = [
    "diagonal",
    "unitwise",
]  # a full block is inverted to 1e-9 where eps bounds its condition


def train_by_metric(rank: int, size: int) -> dict[str, Tensor]:
    found = {}
    for name in METRICS:
        for wrapped in (True, False):
            network = DDP(model())
            rule, criterion = optimizer(network if wrapped else network.module, name)
            train(network, rule, [part(b, rank, size) for b in batches()], criterion)
            found[f"{name} {wrapped}"] = numbers(network)
            rule.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_one_rank_with_all_samples(size: int) -> None:
    results = run(train_by_metric, size)
    for name in METRICS:
        expected = alone(name)
        for result in results:
            same(result[f"{name} True"], expected)
            same(result[f"{name} False"], expected)


def train_other_ways(rank: int, size: int) -> dict[str, Tensor]:
    found = {}
    for reduction in REDUCTIONS:
        network = DDP(model())
        rule, criterion = optimizer(network, "exact", reduction=reduction, eps=1e-3)
        train(network, rule, [part(b, rank, size) for b in batches()], criterion)
        found[reduction] = numbers(network)
    for start in ("identity", 3):
        network = DDP(model())
        rule, criterion = optimizer(network, "outer-product", metric_start=start)
        train(network, rule, [part(b, rank, size) for b in batches()], criterion)
        found[f"start {start}"] = numbers(network)
    network = DDP(model())
    rule, criterion = optimizer(network, "exact", metric_every=3)
    train(network, rule, [part(b, rank, size) for b in batches()], criterion)
    found["every"] = numbers(network)
    network = DDP(model())
    rule, criterion = optimizer(network, "exact", lr=0.002)
    train(network, rule, [part(b, rank, size) for b in batches(70)], criterion)
    found["long"] = numbers(network)
    return found


def test_every_reduction_start_and_rhythm() -> None:
    for result in run(train_other_ways, 2):
        for reduction in REDUCTIONS:
            same(result[reduction], alone("exact", reduction=reduction, eps=1e-3))
        for start in ("identity", 3):
            same(result[f"start {start}"], alone("outer-product", metric_start=start))
        same(result["every"], alone("exact", metric_every=3))
        same(result["long"], alone("exact", steps=70, lr=0.002))  # the metric is tidied after 64


def train_unequal(rank: int, size: int) -> dict[str, Tensor]:
    data = [part(b, rank, size, [19, 5]) for b in batches()]
    network = DDP(model())
    rule, criterion = optimizer(network, "exact")
    train(network, rule, data, criterion, weight=share)
    summed = DDP(model())
    total = qd.Riemannian(summed, lr=0.02, gamma=0.2, loss_reduction="sum")
    train(summed, total, data, nn.CrossEntropyLoss(reduction="sum"))
    return {"share": numbers(network), "sum": numbers(summed)}


def test_unequal_batches() -> None:
    summed = model()
    rule = qd.Riemannian(summed, lr=0.02, gamma=0.2, loss_reduction="sum")
    train(summed, rule, batches(), nn.CrossEntropyLoss(reduction="sum"))
    for result in run(train_unequal, 2):
        same(result["share"], alone("exact"))
        same(result["sum"], numbers(summed))


def accumulate(rank: int, size: int) -> dict[str, Tensor]:
    found = {}
    for name in ("loss", "exact"):
        for wrapped in (True, False):
            network = DDP(model())
            rule, criterion = optimizer(network if wrapped else network.module, name)
            for batch in batches():
                rule.zero_grad()
                x, t = part(batch, rank, size)
                with network.no_sync():
                    (criterion(network(x[:6]), t[:6]) / 2).backward()
                (criterion(network(x[6:]), t[6:]) / 2).backward()
                rule.step()
            found[f"{name} {wrapped}"] = numbers(network)
    return found


class Counter:
    """Counts the calls of ``all_reduce`` while it is entered."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> "Counter":
        self._all_reduce = dist.all_reduce
        dist.all_reduce = self._counted
        return self

    def _counted(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return self._all_reduce(*args, **kwargs)

    def __exit__(self, *exception: object) -> None:
        dist.all_reduce = self._all_reduce


def test_accumulation_with_no_sync() -> None:
    for found in run(accumulate, 2):
        for name in ("loss", "exact"):
            same(found[f"{name} True"], alone(name))
            same(found[f"{name} False"], alone(name))


def shadow(rank: int, size: int) -> tuple[int, int]:
    network = DDP(model())
    rule, criterion = optimizer(network, "outer-product")
    during, after = Counter(), Counter()
    for batch in batches():
        rule.zero_grad()
        x, t = part(batch, rank, size)
        loss = criterion(network(x), t)
        with during:
            loss.backward()
        with after:
            rule.step()
    return during.calls, after.calls


def test_moments_leave_during_the_backward_pass() -> None:
    """The first minibatch waits for the step (3 more calls: the models' sizes, the centres, the bucket)."""
    for during, after in run(shadow, 2):
        assert during == STEPS - 1
        assert after == STEPS + 3


def skip(rank: int, size: int) -> tuple[Tensor, Tensor, int, Tensor]:
    network = DDP(model())
    rule, criterion = optimizer(network, "exact")
    data = [part(b, rank, size) for b in batches()]
    train(network, rule, data[:2], criterion)
    before = numbers(network)
    x, t = data[2]
    x = x.clone()
    if rank == 1:
        x[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(network, rule, [(x, t)], criterion)
    after = numbers(network)
    # A non-finite metric on one rank alone, under finite gradients.
    rule.zero_grad()
    x, t = data[3]
    loss = criterion(network(x), t)
    loss.backward()
    if rank == 1:
        rule._exchange._weights.append(torch.tensor(torch.inf))
    rule.step()
    return before, after, len(caught), numbers(network)


def test_all_ranks_skip_together() -> None:
    for before, after, warned, last in run(skip, 2):
        assert warned >= 1
        assert torch.equal(before, after)
        assert torch.equal(before, last)


class Choosy(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


def choose(rank: int, size: int) -> Tensor:
    network = DDP(Choosy(), find_unused_parameters=True)
    rule = qd.Riemannian(network, lr=0.02, gamma=0.2)
    for step, batch in enumerate(batches()):
        rule.zero_grad()
        x, t = part(batch, rank, size)
        nn.functional.cross_entropy(network(x, (rank + step) % 2), t).backward()
        rule.step()
    return numbers(network)


def test_a_layer_that_only_some_ranks_use() -> None:
    """One rank goes through both layers with half of the samples each."""
    network = Choosy()
    criterion = qd.Categorical()
    rule = qd.Riemannian(network, criterion, lr=0.02, gamma=0.2)
    for step, batch in enumerate(batches()):
        rule.zero_grad()
        halves = [network(part(batch, rank, 2)[0], (rank + step) % 2) for rank in (0, 1)]
        criterion(torch.cat(halves), batch[1]).backward()
        rule.step()
    first, second = run(choose, 2)
    same(first, second)
    same(first, numbers(network))


def passes(rank: int, size: int) -> dict[str, str]:
    """One rank accumulates two passes, the others have one: what the optimizer says to it, if anything."""
    found = {}
    for name in ("loss", "exact"):
        network = DDP(model())
        rule, criterion = optimizer(network, name)
        x, t = part(batches()[0], rank, size)
        if rank == 0:
            with network.no_sync():
                (criterion(network(x[:6]), t[:6]) / 2).backward()
            (criterion(network(x[6:]), t[6:]) / 2).backward()
        else:
            criterion(network(x), t).backward()
        found[name] = complaint(rule)
    return found


def complaint(rule: qd.Riemannian) -> str:
    """What a step that cannot be taken says; nothing if it is taken."""
    try:
        rule.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_different_numbers_of_passes() -> None:
    """Without a criterion, by what to multiply a pass's part of a mean is not known; a criterion's loss tells it."""
    for rank, found in enumerate(run(passes, 2)):
        assert "different numbers of backward passes" in found["loss"]
        assert f"this one had {2 - rank}" in found["loss"]
        assert not found["exact"]


def watch_one(rank: int, size: int) -> Tensor:
    network = DDP(Choosy(), find_unused_parameters=True)
    rule = qd.Riemannian(network, lr=0.02, gamma=0.2, params=network.module.layers[0].parameters())
    for batch in batches():
        network.zero_grad()
        rule.zero_grad()
        x, t = part(batch, rank, size)
        nn.functional.cross_entropy(network(x, rank), t).backward()
        rule.step()
    return numbers(network)


def test_a_rank_without_a_pass_goes_by_the_others() -> None:
    network = Choosy()
    layer = network.layers[0]
    rule = qd.Riemannian(network, lr=0.02, gamma=0.2, params=layer.parameters(), loss_scale=0.5)
    for batch in batches():
        rule.zero_grad()
        x, t = part(batch, 0, 2)
        (nn.functional.cross_entropy(network(x, 0), t) / 2).backward()  # DDP's mean of two ranks
        rule.step()
    for result in run(watch_one, 2):
        same(result, numbers(network))


def unheard(rank: int, size: int) -> dict[str, tuple[str, str, Tensor]]:
    found = {}
    data = [part(b, rank, size) for b in batches()]
    for name in ("outer-product", "exact"):
        network = DDP(model())
        rule, criterion = optimizer(network, name)
        said = []
        for step, (x, t) in enumerate(data):
            if step < 2:  # the first one finds no metric yet
                rule.zero_grad()
                nn.functional.cross_entropy(network(x), t).backward()
                said.append(complaint(rule))
            train(network, rule, [(x, t)], criterion)
        found[name] = (*said, numbers(network))
    return found


def test_a_loss_that_is_not_the_criterions() -> None:
    for result in run(unheard, 2):
        for name, (first, later, parameters) in result.items():
            assert "saw no loss" in first and "saw no loss" in later
            same(parameters, alone(name))


def empty(rank: int, size: int) -> str:
    network = DDP(model())
    rule = qd.Riemannian(network, lr=0.02, loss_reduction="sum")
    x, t = batches()[0]
    nn.functional.cross_entropy(network(x[:0]), t[:0], reduction="sum").backward()
    return complaint(rule)


def test_no_samples_on_any_rank() -> None:
    for message in run(empty, 2):
        assert "the minibatch is empty" in message


def learn_std_alone(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One step of the criterion, with gradients for none of the model's layers."""
    criterion = qd.LearnedGaussian(3).double()
    rule = qd.Riemannian(network, criterion, lr=0.02, metric="exact")
    x, t = batch
    criterion(network(x).detach(), t).backward()
    rule.step()
    return criterion.log_std.detach()


def criterion_only(rank: int, size: int) -> Tensor:
    return learn_std_alone(DDP(model()), regression(rank, size)[0])


def test_gradients_of_the_criterion_only() -> None:
    expected = learn_std_alone(model(), regression(0, 1)[0])
    assert expected.abs().min() > 0
    for log_std in run(criterion_only, 2):
        same(log_std, expected)


def step_without_lr(rank: int, size: int) -> Tensor:
    network, criterion = DDP(model()), qd.Categorical()
    rule = qd.Riemannian(network, criterion, metric="exact", step_fraction=1.0)
    train(network, rule, [part(b, rank, size) for b in batches()], criterion)
    return numbers(network)


def test_the_step_without_a_learning_rate() -> None:
    network, criterion = model(), qd.Categorical()
    rule = qd.Riemannian(network, criterion, metric="exact", step_fraction=1.0)
    train(network, rule, batches(), criterion)
    for result in run(step_without_lr, 2):
        same(result, numbers(network))


def learn_std(rank: int, size: int) -> tuple[Tensor, Tensor]:
    network, criterion = DDP(model()), qd.LearnedGaussian(3).double()
    rule = qd.Riemannian(network, criterion, lr=0.02, metric="exact")
    train(network, rule, regression(rank, size), criterion)
    return numbers(network), criterion.log_std.detach()


def regression(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    return [(x, x[:, :3].sin()) for x, _ in (part(b, rank, size) for b in batches())]


def test_the_criterions_own_parameters() -> None:
    network, criterion = model(), qd.LearnedGaussian(3).double()
    rule = qd.Riemannian(network, criterion, lr=0.02, metric="exact")
    train(network, rule, regression(0, 1), criterion)
    for parameters, log_std in run(learn_std, 2):
        same(parameters, numbers(network))
        same(log_std, criterion.log_std.detach())


def draw(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    data = [part(b, rank, size) for b in batches()]
    network = DDP(model())
    rule, criterion = optimizer(network, "monte-carlo", seed=5)
    train(network, rule, data[:3], criterion)
    saved, weights = [copy.deepcopy(rule.state_dict())], copy.deepcopy(network.state_dict())
    drawn = rule._collector.generator.get_state()
    train(network, rule, data[3:], criterion)
    dist.broadcast_object_list(saved, src=0)  # the checkpoint of rank 0 is everybody's
    again = DDP(model())
    again.load_state_dict(weights)
    resumed, criterion = optimizer(again, "monte-carlo", seed=5)
    resumed.load_state_dict(saved[0])
    train(again, resumed, data[3:], criterion)
    return numbers(network), numbers(again), drawn


def test_draws_differ_by_rank_and_resume_from_rank_zeros_checkpoint() -> None:
    first, second = run(draw, 2)
    for straight, resumed, _ in (first, second):
        assert torch.equal(straight, resumed)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[2], second[2])


def apart(rank: int, size: int) -> tuple[Tensor, str]:
    network = model()
    rule, criterion = optimizer(network, "exact", process_group=None)
    train(network, rule, batches(), criterion)
    other = nn.Linear(6, 3 + rank).double()
    try:
        train(other, qd.Riemannian(other, lr=0.1), batches())
    except RuntimeError as error:
        return numbers(network), str(error)
    return numbers(network), ""


def test_ranks_that_have_nothing_to_do_with_each_other() -> None:
    for parameters, message in run(apart, 2):
        assert torch.equal(parameters, alone("exact"))
        assert "process_group=None" in message
