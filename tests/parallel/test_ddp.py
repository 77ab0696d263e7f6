"""The doors over torch.distributed on forked ranks: DDP's hook, FSDP2, average, LocalSGD."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment

FOLDER = Path(__file__).parent / "ddp"
SECONDS = 300
APART = ("average", "fsdp")  # by themselves, and with 4 ranks, too
# Where ranks own different shards, replicas exist, or ranks add in another order.
WITH_FOUR = "replicas or codecs or resumes or warm_up or corrupt or operations or simulates"
EVERY = os.environ.get("HVD_ADAPTIVE_EVERY_CASE") == "1"


def files(subject: str) -> list[str]:
    """The checks of one of APART, or all others."""
    found = sorted(FOLDER.glob("check_*.py"))
    names = [f"check_{name}" for name in ([subject] if subject in APART else APART)]
    return [str(path) for path in found if (path.stem in names) == (subject in APART)]


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    ("subject", "ranks"), [("ddp", 2), ("average", 2), ("fsdp", 2), ("average", 4), ("fsdp", 4)]
)
def test_ddp(subject: str, ranks: int) -> None:
    """Every check passes on every rank. By hand: python tests/parallel/ddp/fork_ranks.py 4 FILE."""
    command = [sys.executable, str(FOLDER / "fork_ranks.py"), str(ranks), *files(subject)]
    if ranks == 4 and not EVERY:
        command += ["-k", WITH_FOUR]
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
