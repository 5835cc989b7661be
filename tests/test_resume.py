"""Save, reload in a new process, continue: bit for bit the uninterrupted run, Monte Carlo included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

WORKER = """
import sys, torch
import quasidiag as qd
from nets import batch, mlp

torch.set_num_threads(1)
start, stop, load, save = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
RUNS = {
    "DOP": (qd.DOP, {}),
    "QDOP": (qd.QDOP, {"momentum": 0.9}),
    "QDMCNat": (qd.QDMCNat, {"samples": 2, "seed": 7}),
    "DMCNat": (qd.DMCNat, {"momentum": 0.5, "metric_every": 3}),
    "QDNat": (qd.QDNat, {"metric_start": 40}),
    "unitwise": (qd.Riemannian, {"metric": "exact", "reduction": "unitwise"}),
    "sparse metric": (qd.QDOP, {"metric_every": 4, "metric_fraction": 0.5, "weight_decay": 0.1}),
    "learned std": (qd.QDMCNat, {}),
    "AdaGrad": (None, {}),
}
saved = torch.load(load) if load != "-" else {}
result = {}
for name, (maker, options) in RUNS.items():
    output = "gaussian" if name == "learned std" else "categorical"
    loss = qd.LearnedGaussian(3).double() if output == "gaussian" else qd.Categorical()
    model = mlp(6, 5, 3, seed=1)
    if maker is None:
        optimizer = qd.AdaGrad(model.parameters(), lr=0.01)
    else:
        optimizer = maker(model, loss, lr=0.01, **options)
    if saved:
        model.load_state_dict(saved[name]["model"])
        loss.load_state_dict(saved[name]["criterion"])
        optimizer.load_state_dict(saved[name]["optimizer"])
    for step in range(start, stop):
        x, t = batch(output, 20, 6, 3, seed=step)
        optimizer.zero_grad()
        loss(model(x), t).backward()
        optimizer.step()
    result[name] = {
        "model": model.state_dict(),
        "criterion": loss.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
torch.save(result, save)
"""


def train(start: int, stop: int, load: Path | None, save: Path) -> dict:
    command = [sys.executable, "-c", WORKER, str(start), str(stop), str(load or "-"), str(save)]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return torch.load(save)


def assert_equal(one: object, other: object, where: str = "") -> None:
    """Bit for bit; `differentiable` is a flag that torch itself adds to the groups on loading."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        one, other = ({k: d[k] for k in d if k != "differentiable"} for d in (one, other))
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where}/{i}")
    else:
        assert one == other, where


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, dict]:
    folder = tmp_path_factory.mktemp("resume")
    whole = train(0, 70, None, folder / "whole.pt")
    half = train(0, 41, None, folder / "half.pt")
    return whole, half, train(41, 70, folder / "half.pt", folder / "resumed.pt")


def test_resumed_runs_are_the_uninterrupted_ones_bit_for_bit(runs: tuple[dict, dict, dict]) -> None:
    whole, _, resumed = runs
    assert_equal(whole, resumed)


def test_something_happened_after_the_break(runs: tuple[dict, dict, dict]) -> None:
    whole, half, _ = runs
    for name in whole:
        assert not torch.equal(whole[name]["model"]["0.weight"], half[name]["model"]["0.weight"])


def test_state_is_plain_tensors_and_numbers(runs: tuple[dict, dict, dict]) -> None:
    """`torch.load` above ran with weights_only, its default: nothing but tensors and plain containers."""
    whole, _, _ = runs
    state = whole["QDOP"]["optimizer"]["state"]
    shapes = {
        key: value.shape
        for entry in state.values()
        for key, value in entry.items()
        if torch.is_tensor(value)
    }
    assert {"m00", "m0i", "mii", "momentum"} <= shapes.keys()
