"""What the checks of trainers share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from ddp_oracles import assert_same_everywhere
from torch import nn


@contextmanager
def shared_folder() -> Iterator[str]:
    """One folder for all ranks."""
    first = dist.get_rank() == 0
    name = [tempfile.mkdtemp() if first else ""]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
        dist.barrier()
    finally:
        if first:
            shutil.rmtree(name[0], ignore_errors=True)


def state_of(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same_everywhere(values: torch.Tensor) -> None:
    """All ranks hold the same bits, and they are finite."""
    assert_same_everywhere([values])
    assert bool(values.isfinite().all())


def groups() -> int:
    """Process groups that exist in this process."""
    return len(dist.distributed_c10d._world.pg_map)
