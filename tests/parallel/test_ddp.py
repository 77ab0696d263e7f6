"""The doors over torch.distributed on forked ranks: DDP's hook, FSDP2, average, LocalSGD."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment

FOLDER = Path(__file__).parent / "ddp"
SECONDS = 600
ALL = sorted(map(str, FOLDER.glob("check_*.py")))
APART = [str(FOLDER / f"check_{name}.py") for name in ("average", "fsdp")]
# Where ranks own different shards, replicas exist, or ranks add in another order.
WITH_FOUR = "replicas or codecs or warm_up or corrupt or operations or simulates"


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("ranks", "files"), [(2, ALL), (4, APART)], ids=["2", "4"])
def test_ddp(ranks: int, files: list[str]) -> None:
    """Every check passes on every rank. By hand: python tests/parallel/ddp/fork_ranks.py 4 FILE."""
    command = [sys.executable, str(FOLDER / "fork_ranks.py"), str(ranks), *files]
    if ranks == 4 and "HVD_ADAPTIVE_EVERY_CASE" not in os.environ:
        command += ["-k", WITH_FOUR]
    done = finished(command)
    assert done.stdout.count(" passed") == ranks, done.stdout


@pytest.mark.parallel
@pytest.mark.timeout(130)
def test_debug_detail() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compares the ranks' collectives: they are alike. DDP takes
    part if it can be constructed so, which crashes PyTorch 2.13's CPU build."""
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    checks = list(APART)
    if finished([sys.executable, "-c", ALONE], debug, check=False).returncode == 0:
        checks.append(str(FOLDER / "check_callers.py"))
    chosen = "asynchronous or kept or accumulation or corrupt or steps_that_differ or options"
    command = [sys.executable, str(FOLDER / "fork_ranks.py"), "2", *checks, "-k", chosen]
    done = finished(command, debug)
    assert done.stdout.count(" passed") == 2, done.stdout


ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
"""


def finished(command, variables=None, check=True) -> subprocess.CompletedProcess[str]:
    """The ended process, which has succeeded if ``check``."""
    done = subprocess.run(
        command,
        env=environment() | (variables or {}),
        text=True,
        timeout=SECONDS,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert not check or done.returncode == 0, done.stdout
    return done
