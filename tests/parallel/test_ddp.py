"""The doors over torch.distributed on forked ranks: DDP's hook, FSDP2, average, LocalSGD."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_runs import ROOT, run

FOLDER = Path(__file__).parent / "ddp"
SECONDS = 900
ALL = sorted(map(str, FOLDER.glob("check_*.py")))
APART = [str(FOLDER / f"check_{name}.py") for name in ("average", "fsdp", "fsdp_training")]
# Where ranks own different shards, replicas exist, or ranks add in another order.
WITH_FOUR = "replicas or codecs or warm_up or corrupt or operations or simulates or another_mesh"
WITH_FOUR += " or different_groups"


# TORCH_DISTRIBUTED_DEBUG=DETAIL compares the ranks' collectives: they are alike.
DEBUGGED = "asynchronous or kept or accumulation or corrupt or steps_that_differ or any_model"
ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
"""


@pytest.mark.parallel
@pytest.mark.timeout(SECONDS + 60)
def test_ddp() -> None:
    """Every check passes on every rank, of two and of four, and as PyTorch compares collectives.
    By hand: python tests/parallel/ddp/fork_ranks.py 4 FILE. DDP is compared if it can be made so,
    which crashes PyTorch 2.13's CPU build."""
    every, debug = "HVD_ADAPTIVE_EVERY_CASE" in os.environ, "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    with_four = ["4", *APART, *([] if every else ["-k", WITH_FOUR])]
    alone = subprocess.run(["env", debug, sys.executable, "-c", ALONE], timeout=60, check=False)
    buckets = [] if alone.returncode else [str(FOLDER / "check_buckets.py")]
    debugged = [debug, "2", *APART, *buckets, "-k", DEBUGGED]
    rounds = ["2", *ALL, "/", *with_four, "/", *debugged]
    told = run([sys.executable, str(FOLDER / "fork_ranks.py"), *rounds], ROOT, SECONDS)
    assert told.count(" passed") == 2 + 4 + 2, told
