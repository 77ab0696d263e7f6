"""The environment that torchrun gives its processes, for forked ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from hvd_adaptive import instances

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def as_launched(monkeypatch):
    """Set this rank's environment; compressors are numbered as in a new process."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "checks"}
    own |= {"GROUP_RANK": "0", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    instances.start_over()
    os.environ.pop("OMPI_COMM_WORLD_RANK", None)
