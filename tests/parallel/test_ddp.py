"""The hook of DistributedDataParallel on forked ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment

HERE = Path(__file__).parent
SECONDS = 120


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("ranks", "checks"), [(2, "."), (4, "check_averages.py")])
def test_ddp(ranks: int, checks: str) -> None:
    """Every check passes on every rank."""
    folder = HERE / "ddp"
    command = [sys.executable, str(folder / "fork_ranks.py"), str(ranks), str(folder / checks)]
    done = subprocess.run(
        command, env=environment(), text=True, timeout=SECONDS, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed") == ranks, done.stdout
