"""Measure what the same ranks need to average the same gradients without compression."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from hvd_adaptive.base.device import wait_for
from hvd_adaptive.transport.world import World

REPEATS = 5


def stock_seconds(
    world: World, sizes: Sequence[int], name: str, device: torch.device
) -> dict[str, float]:
    """Return the seconds of one exchange in float32 and in float16, of the slowest rank.

    All ranks must call this together. Each exchange averages tensors of ``sizes`` as training
    without compression does: Horovod's optimizer submits one allreduce for each gradient, and
    Horovod fuses them; DDP allreduces its buckets. All tensors are there when it begins, so no
    computation hides it. float16 includes both conversions.

    The result is the median of ``REPEATS`` exchanges. One more before them does not count.

    Args:
        world: The ranks.
        sizes: Lengths of the tensors.
        name: Beginning of the collectives' names.
        device: Device of the gradients.
    """
    tensors = [torch.ones(size, dtype=torch.float32, device=device) for size in sizes]
    own = []
    for dtype in (torch.float32, torch.float16):
        taken = [_seconds(world, tensors, dtype, f"{name}.stock") for _ in range(1 + REPEATS)]
        own.append(statistics.median(taken[1:]))
    everyone = world.gather_equal(
        torch.tensor(own, dtype=torch.float64, device="cpu"), f"{name}.stock.seconds"
    )
    slowest = everyone.amax(dim=0).tolist()
    return dict(zip(("float32", "float16"), slowest, strict=True))


def _seconds(world: World, tensors: Sequence[torch.Tensor], dtype: torch.dtype, name: str) -> float:
    if tensors:
        wait_for(tensors[0].device)
    begin = time.perf_counter()
    sent = [tensor.to(dtype) for tensor in tensors]  # the tensors themselves, in float32
    world.average_all(sent, name)
    for tensor, average in zip(tensors, sent, strict=True):
        if average is not tensor:
            tensor.copy_(average)
    if tensors:
        wait_for(tensors[0].device)
    return time.perf_counter() - begin
