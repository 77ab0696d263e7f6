"""A compressor that is bound again and again leaves nothing behind."""

from __future__ import annotations

import gc

import horovod.torch as hvd
import psutil
import torch

from hvd_adaptive import ALQ

REBINDS = 100
# Communicators of the level sync's own took 9 to 13 KiB each.
BYTES = 4096


def test_memory_of_rebinds():
    """Each fits a table, and is followed by a change of settings to one of two."""
    weight = torch.nn.Parameter(torch.zeros(2048))
    compressor = ALQ(bucket_size=512, update_steps=lambda step: True, samples=2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1),
        named_parameters=[("rebinds.weight", weight)],
        compression=compressor,
    )

    def rebind(times: int) -> int:
        """Memory of this process afterwards."""
        for number in range(times):
            compressor.set(samples=2 + number % 2)
            optimizer.zero_grad()
            (weight * (1.0 + torch.arange(2048))).sum().backward()
            optimizer.step()
        gc.collect()
        return psutil.Process().memory_info().rss

    before = rebind(REBINDS)
    after = rebind(REBINDS)
    assert compressor.parts.default.table_version == 2 * REBINDS
    assert after - before < BYTES * REBINDS, (after - before) / REBINDS
