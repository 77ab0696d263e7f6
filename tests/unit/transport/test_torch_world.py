"""Ranks of torch.distributed, as far as one process shows."""

from __future__ import annotations

from hvd_adaptive.transport.torch_world import TorchWorld


def test_a_closed_world_leaves_its_group_to_the_next(alone):
    first = TorchWorld()
    beside = TorchWorld()
    assert beside.group is not first.group
    first.close()
    assert TorchWorld().group is first.group
    assert TorchWorld().group is not first.group
