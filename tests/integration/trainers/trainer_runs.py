"""What the checks of trainers share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from ddp_oracles import assert_same_everywhere
from torch import nn

from hvd_adaptive import ALQ

SCALE = 2.0**10  # of fp16; it halves when gradients overflow


@contextmanager
def shared_folder() -> Iterator[str]:
    first = dist.get_rank() == 0
    name = [tempfile.mkdtemp() if first else ""]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
        dist.barrier()
    finally:
        if first:
            shutil.rmtree(name[0], ignore_errors=True)


def network() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))


def compressor() -> ALQ:
    return ALQ(bits=4, error_feedback=1.0)


def same_everywhere(values: torch.Tensor) -> None:
    """All ranks hold the same bits, and they are finite."""
    assert_same_everywhere(values)
    assert bool(values.isfinite().all())


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)


def with_fp16(accelerator: Accelerator) -> None:
    """Let Accelerate use float16 and a GradScaler on a CPU, as it does on a GPU."""
    accelerator.native_amp, accelerator.scaler = True, scaler()


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)
