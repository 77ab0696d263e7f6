"""Fixtures of the tests of one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def alone():
    """A process group of torch.distributed that has this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
