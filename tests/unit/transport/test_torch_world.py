"""Ranks of torch.distributed, as far as one process shows."""

from __future__ import annotations

import time

from hvd_adaptive.transport import torch_world
from hvd_adaptive.transport.torch_world import TorchWorld


def test_a_closed_world_leaves_its_group_to_the_next(alone):
    first = TorchWorld()
    beside = TorchWorld()
    assert beside.group is not first.group
    first.close()
    assert TorchWorld().group is first.group
    assert TorchWorld().group is not first.group


def test_a_rank_that_waits_for_the_first_step_warns(alone, monkeypatch, caplog):
    """Another rank may have no hook, and never come."""
    made = torch_world._fillers
    monkeypatch.setattr(torch_world, "LATE", 0.01)
    monkeypatch.setattr(torch_world, "_fillers", lambda group: time.sleep(0.3) or made(group))
    TorchWorld()
    (record,) = caplog.records
    assert record.message.startswith("rank 0 still waits for other ranks")
    TorchWorld().close()
