"""Tests are repeatable."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from repeatable import first_compressors, settle

__all__ = ["first_compressors"]

settle()


@pytest.fixture
def alone():
    """A process group of torch.distributed that has this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
