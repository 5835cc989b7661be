"""``step="auto"`` in the loops that people have: schedulers, groups, accumulation, mixed precision, copies, checkpoints."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quasidiag as qd
from nets import batch, digits, mlp
from quasidiag.auto.report import FIRST, WARM_UP

SIZES = (4, 6, 3)
HERE = Path(__file__).parent


def problem(n: int = 24, seed: int = 0) -> tuple[nn.Sequential, qd.OutputModel, Tensor, Tensor]:
    return mlp(*SIZES, seed=seed), qd.Categorical(), *batch("categorical", n, 4, 3, seed)


def train(
    model: nn.Module, loss: nn.Module, rule: Any, x: Tensor, t: Tensor, steps: int = 1
) -> None:
    for _ in range(steps):
        rule.zero_grad()
        loss(model(x), t).backward()
        rule.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def moves(model: nn.Module, loss: nn.Module, rule: Any, x: Tensor, t: Tensor) -> list[Tensor]:
    before = values(model)
    train(model, loss, rule, x, t)
    return [p - q for p, q in zip(values(model), before)]


def test_no_argument_is_needed() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    assert optimizer.auto is not None and optimizer.param_groups[0]["lr"] == 1.0
    first = loss(model(x), t).item()
    train(model, loss, optimizer, x, t, 30)
    assert loss(model(x), t).item() < 0.5 * first


# ------------------------------------------------ lr as a factor


@pytest.mark.usefixtures("full")
def test_the_factor_rises_to_what_it_is() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss, lr=0.5, step="auto")
    factors = []
    for _ in range(WARM_UP + 2):
        train(model, loss, optimizer, x, t, 1)
        assert optimizer.auto is not None
        factors.append(optimizer.auto.factor)
    expected = [0.5 * min(1.0, FIRST + (1 - FIRST) * k / WARM_UP) for k in range(WARM_UP + 2)]
    assert optimizer.auto is not None and optimizer.auto.retreats == 0
    assert factors == pytest.approx(expected)


@pytest.mark.usefixtures("unbounded")
def test_a_scheduler_lowers_the_factor() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    twin = copy.deepcopy((model, loss, optimizer))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    scheduler.step()
    whole = moves(*twin, x, t)
    half = moves(model, loss, optimizer, x, t)
    torch.testing.assert_close(half, [u / 2 for u in whole])
    assert optimizer.auto is not None and twin[2].auto is not None
    assert optimizer.auto.alpha == pytest.approx(twin[2].auto.alpha / 2)


@pytest.mark.usefixtures("unbounded")
def test_groups_with_factors_of_their_own() -> None:
    """The slower group's part of the direction is shorter, and the rest is the same model."""
    model, loss, x, t = problem()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.25}]
    optimizer = qd.Riemannian(model, loss, params=groups, orthogonal=False)
    reference, _, _, _ = problem()
    plain = qd.Riemannian(reference, loss, orthogonal=False)
    uneven, even = moves(model, loss, optimizer, x, t), moves(reference, loss, plain, x, t)
    ratios = [float((u / v).mean()) for u, v in zip(uneven, even)]
    assert ratios[0] == pytest.approx(ratios[1]) and ratios[2] == pytest.approx(ratios[3])
    assert ratios[2] / ratios[0] == pytest.approx(0.25)
    assert optimizer.auto is not None
    g = [p.grad for p in model.parameters()]
    images = [r * v for r, v in zip([1, 1, 0.25, 0.25], g)]
    length = -optimizer.auto.alpha * sum(float((u * v).sum()) for u, v in zip(uneven, images))
    assert optimizer.auto.length == pytest.approx(length)


def test_a_group_with_factor_zero_stays() -> None:
    model, loss, x, t = problem()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = qd.Riemannian(model, loss, params=groups)
    train(model, loss, optimizer, x, t, 3)
    optimizer.param_groups[1]["lr"] = 0.0
    moved = moves(model, loss, optimizer, x, t)
    assert moved[0].abs().max() > 0 and moved[2].abs().max() == 0 == moved[3].abs().max()
    optimizer.param_groups[0]["lr"] = 0.0
    assert all(u.abs().max() == 0 for u in moves(model, loss, optimizer, x, t))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_warm_up_may_begin_at_zero() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    first = float(loss(model(x), t).detach())
    for _ in range(12):
        train(model, loss, optimizer, x, t)
        scheduler.step()
    assert float(loss(model(x), t).detach()) < first


def test_a_layer_that_rests_is_left_alone() -> None:
    """Also when the step of the others is taken back."""
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    train(model, loss, optimizer, x, t, 3)
    model[0].requires_grad_(False)
    train(model, loss, optimizer, x, t, 1)  # whatever the last step did to it is judged now
    kept = [p.detach().clone() for p in model[0].parameters()]
    for _ in range(4):
        with torch.no_grad():
            for p in model[2].parameters():
                push = torch.zeros_like(p)
                push[0] = 50.0
                p.add_(push)
                optimizer.state[p].get("update", push.clone()).add_(push)
        train(model, loss, optimizer, x, t)
    assert optimizer.auto is not None and optimizer.auto.retreats
    assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), kept))


def test_a_gradient_that_has_faded_away() -> None:
    """Its average underflows in the end, and the weights stay finite."""
    model, loss = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), qd.Categorical()
    _, _, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    train(model, loss, optimizer, x.float(), t, 2)
    with torch.no_grad():
        model[0].bias.fill_(-1e3)  # all units are dead
    train(model, loss, optimizer, x.float(), t, 400)
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_output_that_was_written_into_is_an_error() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    output = model(x)
    loss(output, t).backward()
    output.detach().sigmoid_()
    with pytest.raises(RuntimeError, match="changed in place"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*diagonal rule")
def test_a_model_without_any_known_layer() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model, (_, loss, x, t) = Plain(), problem()
    optimizer = qd.Riemannian(model, loss)
    first = float(loss(model(x), t).detach())
    train(model, loss, optimizer, x, t, 20)
    assert float(loss(model(x), t).detach()) < first


# ------------------------------------------------ Accumulation and mixed precision


@pytest.mark.parametrize("pieces", [2, 3])
def test_micro_batches_equal_the_batch(pieces: int) -> None:
    model, loss, x, t = problem()
    other = copy.deepcopy(model)
    # The metric is measured from the mean of the first micro-batch, which safeguards depend on.
    whole = qd.Riemannian(model, loss, safeguard=None)
    rule = qd.Riemannian(other, loss, safeguard=None)
    train(model, loss, whole, x, t, 7)
    for _ in range(7):
        rule.zero_grad()
        for part, target in zip(x.chunk(pieces), t.chunk(pieces)):
            (loss(other(part), target) / pieces).backward()
        rule.step()
    torch.testing.assert_close(values(other), values(model), rtol=1e-7, atol=1e-9)
    assert rule.auto is not None and whole.auto is not None
    found, expected = vars(rule.auto), vars(whole.auto)
    for name in [name for name, kept in expected.items() if isinstance(kept, dict | list)]:
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-6)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_forward_pass_that_is_not_backpropagated_does_not_count() -> None:
    model, loss, x, t = problem()
    other = copy.deepcopy(model)
    plain, rule = qd.Riemannian(model, loss), qd.Riemannian(other, loss)
    train(model, loss, plain, x, t, 3)
    for _ in range(3):
        loss(other(3 * x), t)
        value = loss(other(x), t)
        loss(other(2 * x), t)
        rule.zero_grad()
        value.backward()
        rule.step()
    torch.testing.assert_close(values(other), values(model))


def test_two_heads_of_one_model() -> None:
    """A sum of two losses has the sum of their Fisher matrices."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = mlp(4, 6), mlp(6, 3), mlp(6, 3, seed=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.trunk(x).tanh()
            return self.left(h), self.right(h)

    model, loss = Heads(), qd.Categorical()
    x, t = batch("categorical", 24, 4, 3)
    optimizer = qd.Riemannian(model, loss, step_every=1)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        left, right = model(x)
        total = loss(left, t) + loss(right, t.flip(0))
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    assert optimizer.auto is not None
    assert optimizer.auto.actual == pytest.approx(losses[-1] - losses[-2])
    assert optimizer.auto.ratio == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**6])
def test_a_gradient_scaler_changes_nothing(scale: float) -> None:
    model, loss, x, t = problem()
    other = copy.deepcopy(model)
    plain, rule = qd.Riemannian(model, loss), qd.Riemannian(other, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    train(model, loss, plain, x, t, 7)
    for _ in range(7):
        rule.zero_grad()
        scaler.scale(loss(other(x), t)).backward()
        scaler.step(rule)
        scaler.update()
    torch.testing.assert_close(values(other), values(model))


def test_a_weighted_loss_has_a_weighted_model() -> None:
    """Ten times the loss: the metric is the same, the curvature ten times, and so the step is that of the loss."""
    model, loss, x, t = problem()
    other = copy.deepcopy(model)
    plain, rule = qd.Riemannian(model, loss), qd.Riemannian(other, loss)
    assert plain.auto is not None and rule.auto is not None
    plain.auto.damping = rule.auto.damping = 0.0
    one = moves(model, loss, plain, x, t)
    before = values(other)
    (10 * loss(other(x), t)).backward()
    rule.step()
    torch.testing.assert_close(
        [p - q for p, q in zip(values(other), before)], one, rtol=1e-5, atol=1e-9
    )


@pytest.mark.usefixtures("warm")
def test_autocast() -> None:
    """The model is replayed in the precision in which it ran; the step is close to the full one."""
    torch.manual_seed(0)
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(y.dtype)
            return y

    model = nn.Sequential(Watched(4, 16), nn.Tanh(), Watched(16, 3))
    loss = qd.Categorical()
    x, t = batch("categorical", 96, 4, 3)
    x = x.float()
    other = copy.deepcopy(model)
    rule, plain = qd.Riemannian(model, loss), qd.Riemannian(other, loss)
    results = []
    for _ in range(10):
        rule.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            value = loss(output.float(), t)
        value.backward()
        rule.step()
        results.append(value.item())
    assert set(seen) == {torch.bfloat16}
    train(other, loss, plain, x, t, 10)
    assert results[-1] < 0.8 * results[0]
    assert loss(model(x), t).item() == pytest.approx(loss(other(x), t).item(), rel=0.1)


# ------------------------------------------------ Copies and checkpoints


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_a_copy_goes_on_as_the_original(way: str) -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    train(model, loss, optimizer, x, t, 6)
    things = model, loss, optimizer
    if way == "deepcopy":
        copied = copy.deepcopy(things)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(things))
    else:
        fresh = copy.deepcopy(model), qd.Categorical()
        copied = (*fresh, qd.Riemannian(*fresh))
        copied[2].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert copied[2].auto == optimizer.auto and copied[2].auto is not optimizer.auto
    train(model, loss, optimizer, x, t, 6)
    train(*copied, x, t, 6)
    assert all(torch.equal(p, q) for p, q in zip(values(model), values(copied[0])))


WORKER = """
import sys, torch
import quasidiag as qd
from nets import batch, mlp

torch.set_num_threads(1)
start, stop, load, save = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.manual_seed(start)
model = torch.nn.Sequential(mlp(6, 8), torch.nn.BatchNorm1d(8).double(), torch.nn.Tanh(), mlp(8, 3))
loss = qd.LearnedGaussian(3).double()
optimizer = qd.Riemannian(model, loss, metric="monte-carlo")
if load != "-":
    saved = torch.load(load)
    for thing in ("model", "loss", "optimizer"):
        globals()[thing].load_state_dict(saved[thing])
for step in range(start, stop):
    x, t = batch("gaussian", 20, 6, 3, seed=step)
    optimizer.zero_grad()
    loss(model(x), t).backward()
    optimizer.step()
torch.save({thing: globals()[thing].state_dict() for thing in ("model", "loss", "optimizer")}, save)
"""


def test_resumed_in_a_new_process_bit_for_bit(tmp_path: Path) -> None:
    def work(*arguments: Any) -> dict[str, Any]:
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WORKER, *map(str, arguments)]
        subprocess.run(command, check=True, env=environment, timeout=300)
        return torch.load(arguments[-1])

    whole = work(0, 12, "-", tmp_path / "whole.pt")
    work(0, 7, "-", tmp_path / "half.pt")
    resumed = work(7, 12, tmp_path / "half.pt", tmp_path / "resumed.pt")
    assert whole["optimizer"]["auto"] == resumed["optimizer"]["auto"]
    for name, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][name]), name
    for key, kept in whole["optimizer"]["state"].items():
        assert "update" in kept
        for name, value in kept.items():
            same = resumed["optimizer"]["state"][key][name]
            assert torch.equal(value, same) if isinstance(value, Tensor) else value == same


# ------------------------------------------------ Nothing is left behind


def test_no_reference_to_the_batch_survives_the_step() -> None:
    model, loss, *_ = problem()
    optimizer = qd.Riemannian(model, loss)
    alive, kept = [], []
    for _ in range(3):
        data = np.random.default_rng(0).standard_normal((6, 4))
        alive.append(weakref.ref(data))
        value = loss(model(torch.from_numpy(data)), torch.arange(6) % 3)
        del data
        value.backward()
        optimizer.step()
        kept.append(value)  # with its graph
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_close_leaves_no_hook() -> None:
    model, loss, x, t = problem()
    with qd.Riemannian(model, loss) as optimizer:
        train(model, loss, optimizer, x, t)
    for module in (*model.modules(), loss):
        assert not module._forward_hooks and not module._forward_pre_hooks


# ------------------------------------------------ What cannot be had


@pytest.mark.parametrize(
    ("name", "instead"),
    [("momentum", "cycle_momentum=False"), ("maximize", "leave it")],
)
def test_what_the_model_decides_is_refused(name: str, instead: str) -> None:
    model, loss, *_ = problem()
    with pytest.raises(ValueError, match=f"no {name} of its own: .*{instead}"):
        qd.Riemannian(model, loss, **{name: 1})
    with pytest.raises(ValueError, match=f"no {name} of its own"):
        qd.Riemannian(model, loss, params=[{"params": model.parameters(), name: 1}])


def test_other_errors() -> None:
    model, loss, x, t = problem()
    with pytest.raises(ValueError, match="needs the criterion"):
        qd.Riemannian(model)
    with pytest.raises(ValueError, match="capturable needs an lr"):
        qd.Riemannian(model, loss, capturable=True)
    with pytest.raises(ValueError, match="safeguard"):
        qd.Riemannian(model, loss, safeguard=(0.1, -1, 0))
    with pytest.raises(ValueError, match="step_fraction"):
        qd.Riemannian(model, loss, step_fraction=0.0)
    optimizer = qd.Riemannian(model, loss)
    train(model, loss, optimizer, x, t)
    before = values(model)
    nn.functional.cross_entropy(model(x), t).backward()
    with pytest.raises(RuntimeError, match="saw no loss"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, values(model)))


def test_a_minibatch_that_is_not_finite_is_skipped() -> None:
    model, loss, x, t = problem()
    optimizer = qd.Riemannian(model, loss)
    train(model, loss, optimizer, x, t, 2)
    before, report = values(model), copy.copy(optimizer.auto)
    with pytest.warns(RuntimeWarning, match="skipped"):
        train(model, loss, optimizer, x * torch.nan, t)
    assert all(torch.equal(p, q) for p, q in zip(before, values(model)))
    assert optimizer.auto == report


def test_minibatches_of_two_samples() -> None:
    x, t = digits()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    loss = qd.Categorical()
    rule = qd.Riemannian(model, loss)
    for _ in range(300):
        picked = torch.randint(len(x), (2,))
        train(model, loss, rule, x[picked].float(), t[picked], 1)
    assert rule.auto is not None and rule.auto.retreats < 60
    with torch.no_grad():
        assert float(loss(model(x.float()), t)) < 1.5
