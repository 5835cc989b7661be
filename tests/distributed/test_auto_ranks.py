"""``step="auto"`` on two ranks goes the way of one rank with all samples."""

import math

import pytest
import torch
from problems import batches, model, numbers, part, same, train
from ranks import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import quasidiag as qd
from quasidiag.auto import descent
from quasidiag.distributed import share

#: The last ones are not measured.
STEPS = 8
Found = tuple[Tensor, dict[str, float]]


def learn(
    network: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    by: float = 0.0,
    late: bool = False,
    **options: object,
) -> Found:
    """The parameters after training, and the last report."""
    criterion = qd.Categorical()
    # Targets that each rank draws for itself are not those of one process.
    rule = qd.Riemannian(network, criterion, metric="exact", **options)  # type: ignore[arg-type]
    assert rule.auto is not None
    if late:
        rule.auto.steps, rule.auto.echo = 120, -1.0
    train(network, rule, data, criterion, lambda n: by * share(n) if by else 1.0)
    report = {**vars(rule.auto), "samples": 0.0}  # a rank has its own of these
    for name in ("forms", "coefficients", "slopes"):
        report |= {f"{name}, {key}": number for key, number in report.pop(name).items()}
    for name in ("proportions", "shortened", "strengths", "falls", "echoes", "further", "decays"):
        report |= {f"{name} {k}": number for k, number in enumerate(report.pop(name))}
    assert report.pop("parts") == [1.0]
    # A first step has nothing to be judged by.
    return numbers(network), {name: x for name, x in report.items() if not math.isnan(x)}


def sure() -> nn.Sequential:
    """A network that has no doubts."""
    network = model()
    with torch.no_grad():
        network[-1].weight.mul_(1e3)
    return network


def known() -> list[tuple[Tensor, Tensor]]:
    """A minibatch that it knows, but for the first sample: no step may promise more than that one's part in the loss."""
    x, _ = batches(1)[0]
    said = sure()(x).detach()
    return [(x, torch.cat([said[:1].argmin(1), said[1:].argmax(1)]))]


def rounded(rank: int, size: int) -> Found:
    """Whose metric is another in its last digits on each rank, as that of two devices may be."""
    exact = descent.lengths
    descent.lengths = lambda *of: exact(*of) * (1 + 1e-9 * rank)
    return learn(DDP(sure()), [part(b, rank, size) for b in known()])


def ranks(rank: int, size: int) -> dict[str, Found]:
    uneven = [part(b, rank, size, [16, 8]) for b in batches(STEPS)]
    return {
        "known": learn(DDP(sure()), [part(b, rank, size) for b in known()]),
        "even": learn(DDP(model()), [part(b, rank, size) for b in batches(STEPS)]),
        "uneven": learn(DDP(model()), uneven, by=1.0),
        "late": learn(DDP(model()), uneven, by=1.0, late=True, step_every=1),
        "multiplied": learn(DDP(model()), uneven, by=64.0),
        "decaying": learn(DDP(model()), uneven, by=1.0, weight_decay=0.1),
    }


def test_ranks_decide_alike() -> None:
    """Whether a step is tried, which they do together, must not depend on rounding."""
    (_, one), (_, other) = run(rounded, 2)
    assert one == other


def test_two_ranks_equal_one_with_all_samples() -> None:
    results = run(ranks, 2)
    whole = learn(model(), batches(STEPS), process_group=None)
    bounded = learn(sure(), known(), process_group=None)
    late = learn(model(), batches(STEPS), late=True, step_every=1, process_group=None)
    assert late[1]["bounces"] > 0
    assert bounded[1]["unbounded"] > 2 * bounded[1]["promise"] > 0
    decaying = learn(model(), batches(STEPS), weight_decay=0.1, process_group=None)
    expected = {"even": whole, "uneven": whole, "known": bounded, "late": late}
    expected["decaying"] = decaying
    for kind, (parameters, report) in expected.items():
        for result in results:
            same(result[kind][0], parameters)
            assert result[kind][1] == pytest.approx(report, rel=1e-6, abs=1e-8)
        assert torch.equal(results[0][kind][0], results[1][kind][0])
        assert results[0][kind][1] == results[1][kind][1]
    for (
        result
    ) in results:  # no gradient scaler's: the other rank's part is all that changes gradients here
        same(result["multiplied"][0], whole[0])
