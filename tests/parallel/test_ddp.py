"""The doors over torch.distributed on forked ranks: DDP's hook, FSDP2, average, LocalSGD."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment

FOLDER = Path(__file__).parent / "ddp"
SECONDS = 900
ALL = sorted(map(str, FOLDER.glob("check_*.py")))
APART = [str(FOLDER / f"check_{name}.py") for name in ("average", "fsdp", "fsdp_training")]
# Where ranks own different shards, replicas exist, or ranks add in another order.
WITH_FOUR = "replicas or codecs or warm_up or corrupt or operations or simulates"


# TORCH_DISTRIBUTED_DEBUG=DETAIL compares the ranks' collectives: they are alike.
DEBUG = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
DEBUGGED = "asynchronous or kept or accumulation or corrupt or steps_that_differ or any_model"


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 60)
def test_ddp() -> None:
    """Every check passes on every rank, of two and of four, and as PyTorch compares collectives.
    By hand: python tests/parallel/ddp/fork_ranks.py 4 FILE. DDP is compared if it can be made so,
    which crashes PyTorch 2.13's CPU build."""
    every = "HVD_ADAPTIVE_EVERY_CASE" in os.environ
    with_four = ["4", *APART, *([] if every else ["-k", WITH_FOUR])]
    compared = list(APART)
    if finished([sys.executable, "-c", ALONE], DEBUG, check=False).returncode == 0:
        compared.append(str(FOLDER / "check_buckets.py"))
    debugged = [*(f"{k}={v}" for k, v in DEBUG.items()), "2", *compared, "-k", DEBUGGED]
    rounds = ["2", *ALL, "/", *with_four, "/", *debugged]
    done = finished([sys.executable, str(FOLDER / "fork_ranks.py"), *rounds])
    assert done.stdout.count(" passed") == 2 + 4 + 2, done.stdout


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
