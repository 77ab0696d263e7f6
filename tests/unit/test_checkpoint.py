"""States of each rank in distributed checkpoints, of ranks of Horovod alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hvd_adaptive.checkpoint import PerRank, key_of_rank

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def become(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, initialized: bool = True) -> None:
    """A rank of Horovod, without torch.distributed."""
    hvd = SimpleNamespace(is_initialized=lambda: initialized, rank=lambda: rank, size=lambda: size)
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)


def test_key_of_rank(monkeypatch):
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    assert key_of_rank() == "rank 0 of 1"
    become(monkeypatch, 1, 2, initialized=False)
    assert key_of_rank() == "rank 0 of 1"
    become(monkeypatch, 1, 2)
    assert key_of_rank() == "rank 1 of 2"


def test_per_rank_refuses_the_checkpoint_of_another_rank(tmp_path, monkeypatch):
    """Without torch.distributed each rank of Horovod writes a folder of its own."""

    def parts(value: float) -> dict[str, PerRank]:
        net = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(net.weight, value)
        optimizer = torch.optim.SGD(net.parameters(), lr=value)
        return {"local": PerRank(model=net, optimizer=optimizer)}

    for rank in range(2):
        become(monkeypatch, rank, 2)
        dcp.save(parts(1.0 + rank), checkpoint_id=tmp_path / str(rank))
    for rank in range(2):
        become(monkeypatch, rank, 2)
        own = parts(0.0)
        dcp.load(own, checkpoint_id=tmp_path / str(rank))
        assert float(own["local"]._parts["model"].weight) == 1.0 + rank
        with pytest.raises(CheckpointException, match=f"Missing key.*rank {rank} of 2"):
            dcp.load(own, checkpoint_id=tmp_path / str(1 - rank))
        assert float(own["local"]._parts["model"].weight) == 1.0 + rank


def test_parts_have_names():
    net = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"^parts: Linear: must be given by name"):
        PerRank(net)
    with pytest.raises(TypeError, match=r"^parts: none was given: must be given by name"):
        PerRank()
