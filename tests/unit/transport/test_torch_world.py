"""Ranks of torch.distributed, as far as one process shows."""

from __future__ import annotations

import torch.distributed as dist

from hvd_adaptive.transport.torch_world import TorchWorld


def test_a_world_whose_groups_were_destroyed_is_not_current():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = TorchWorld()
        assert world.is_current()
    finally:
        dist.destroy_process_group()
    assert not world.is_current()


def test_a_closed_world_leaves_its_group_to_the_next(alone):
    first = TorchWorld()
    beside = TorchWorld()
    assert beside.group is not first.group
    first.close()
    assert TorchWorld().group is first.group
    assert TorchWorld().group is not first.group
