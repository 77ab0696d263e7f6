"""average() over torch.distributed."""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist
from list_averages import *  # noqa: F403
from list_averages import drawn

from hvd_adaptive import QSGD, average
from hvd_adaptive.ddp import CompressionState
from hvd_adaptive.run import worker
from hvd_adaptive.run.worker import FIND_IT

module = sys.modules["hvd_adaptive.hooks.average"]
RANK, RANKS = dist.get_rank(), dist.get_world_size()


def test_groups():
    """Pairs of ranks average among themselves."""
    pairs = [list(range(first, min(first + 2, RANKS))) for first in range(0, RANKS, 2)]
    groups = [dist.new_group(pair) for pair in pairs]
    pair, group = pairs[RANK // 2], groups[RANK // 2]
    compressor = QSGD(bits=8, norm="linf")
    (result,) = average(drawn(RANK, 0)[:1], compressor, group=group)
    wanted = torch.stack([drawn(rank, 0)[0] for rank in pair]).mean(0)
    assert (result - wanted).norm() < 0.02 * wanted.norm()
    with pytest.raises(ValueError, match="serves another group"):
        average([result], compressor)
    compressor.close()
    average([result], compressor)


def test_one_compressor_serves_one_caller():
    model = torch.nn.Linear(3, 3)
    compressor = QSGD(bits=4)
    CompressionState(compressor, model.named_parameters())
    with pytest.raises(ValueError, match="already serves an optimizer or a model"):
        average([torch.ones(3)], compressor)
    other = QSGD(bits=4)
    average([torch.ones(3)], other)
    with pytest.raises(ValueError, match="already serves"):
        CompressionState(other, model.named_parameters())
    with pytest.raises(RuntimeError, match="serves average"):
        other.compress(torch.ones(3))


@pytest.mark.skipif(RANKS < 2, reason="one rank waits for nobody")
def test_average_says_how_to_find_the_rank_that_is_missing(monkeypatch, caplog):
    """A rank that waits logs its own number, and what the silence of another one means."""
    compressor = QSGD(bits=4)
    average([torch.ones(3000)], compressor)
    monkeypatch.setattr(worker, "STALL", 0.3)
    if RANK == RANKS - 1:
        time.sleep(1.0)
    average([torch.ones(3000)], compressor)
    told = [message for message in caplog.messages if "still waits" in message]
    if RANK == RANKS - 1:
        assert not told
    else:
        text = f"rank {RANK} still waits for other ranks to call average()\n{FIND_IT}"
        assert set(told) == {text} and len(told) >= 2  # repeated


def test_average_with_a_new_compressor_each_time(monkeypatch, caplog):
    """Such a loop is warned of once, on the first rank; one list for each of many compressors is
    not."""
    monkeypatch.setattr(module, "_thrown_away", module.ThrownAway())
    kept = [QSGD(bits=4) for _ in range(12)]
    for _ in range(2):
        for compressor in kept:
            average([torch.ones(30)], compressor)
    for _ in range(8):
        average([torch.ones(30)], QSGD(bits=4))
    average([torch.ones(30)], kept[0])
    assert "new compressor" not in caplog.text
    for _ in range(30):
        average([torch.ones(30)], QSGD(bits=4))
    told = [r for r in caplog.records if "a new compressor each time, 10 times" in r.getMessage()]
    assert len(told) == int(RANK == 0)
    assert all("construct one before the loop" in r.getMessage() for r in told)
