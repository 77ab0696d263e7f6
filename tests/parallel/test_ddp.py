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
def test_ddp() -> None:
    """Every check passes on every rank. By hand: python tests/parallel/ddp/fork_ranks.py 4 FILE."""
    ranks, folder = 2, HERE / "ddp"
    command = [sys.executable, str(folder / "fork_ranks.py"), str(ranks), str(folder)]
    done = subprocess.run(
        command,
        env=environment(),
        text=True,
        timeout=SECONDS,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" passed") == ranks, done.stdout
