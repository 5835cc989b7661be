"""The examples for several ranks run under torchrun, and their loss goes down."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytest.importorskip("mlxtend")


def torchrun(name: str, ranks: int, *options: str) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=localhost", f"--nproc-per-node={ranks}", str(EXAMPLES / name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"training loss ([\d.]+)", done.stdout)]


def test_ddp() -> None:
    losses = torchrun("ddp.py", 2, "--epochs=2", "--digits=2000")
    assert losses[1] < 0.7 * losses[0]


def test_fsdp2(tmp_path: Path) -> None:
    losses = torchrun("fsdp2.py", 2, "--epochs=2", "--digits=2000", f"--checkpoint={tmp_path}")
    assert losses[1] < 0.7 * losses[0]
    assert (tmp_path / ".metadata").exists()
