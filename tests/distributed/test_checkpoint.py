"""Distributed checkpoints: saved on two ranks, loaded on one and on four, and training goes on as if nothing was."""

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from problems import alone, batches, model, numbers, optimizer, part, same, train
from ranks import run
from test_fsdp import shard, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import quasidiag as qd

METRIC, HALF = "exact", 3
without_ranks = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(rank: int, size: int, folder: str) -> Tensor:
    network = shard(model())
    rule, criterion = optimizer(network, METRIC, metric_every=2)
    train(network, rule, [part(b, rank, size) for b in batches()[:HALF]], criterion)
    weights, state = get_state_dict(network, rule)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return whole(network)


def restore(network: nn.Module, rule: qd.Riemannian, folder: str) -> None:
    weights, state = get_state_dict(network, rule)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(network, rule, model_state_dict=weights, optim_state_dict=state)


def resume(rank: int, size: int, folder: str) -> Tensor:
    network = shard(model())
    rule, criterion = optimizer(network, METRIC, metric_every=2)
    restore(network, rule, folder)
    assert rule.steps == HALF
    train(network, rule, [part(b, rank, size) for b in batches()[HALF:]], criterion)
    return whole(network)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    run(save, 2, folder)
    return folder


@pytest.mark.parametrize("size", [1, 4])
def test_saved_on_two_ranks_loaded_on_others(saved: str, size: int) -> None:
    for result in run(resume, size, saved):
        same(result, alone(METRIC, metric_every=2))


@without_ranks
def test_saved_on_two_ranks_loaded_without_any(saved: str) -> None:
    network = model()
    rule, criterion = optimizer(network, METRIC, metric_every=2)
    restore(network, rule, saved)
    train(network, rule, batches()[HALF:], criterion)
    same(numbers(network), alone(METRIC, metric_every=2))


@without_ranks
def test_a_checkpoint_before_the_first_step_leaves_no_trace(tmp_path: Path) -> None:
    network = model()
    rule, criterion = optimizer(network, METRIC)
    weights, state = get_state_dict(network, rule)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    restore(network, rule, str(tmp_path))
    train(network, rule, batches(), criterion)
    same(numbers(network), alone(METRIC))


@without_ranks
def test_the_report_of_a_step_without_a_learning_rate(tmp_path: Path) -> None:
    """What is averaged begins anew; damping, curvature and the number of steps do not."""
    network, criterion = model(), qd.Categorical()
    rule = qd.Riemannian(network, criterion)
    train(network, rule, batches() * 5, criterion)
    weights, state = get_state_dict(network, rule)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    other = model()
    resumed = qd.Riemannian(other, criterion)
    restore(other, resumed, str(tmp_path))
    same(numbers(other), numbers(network))
    assert rule.auto is not None and resumed.auto is not None
    assert resumed.auto.written() == rule.auto.written()
    assert rule.auto.steps >= 5 and rule.auto.damping > 0
    train(other, resumed, batches(), criterion)
    assert resumed.auto.steps > rule.auto.steps
