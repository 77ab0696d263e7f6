"""Parameters that differ between ranks, by each door: all of them warn, once, and go on (see
tests/nets.py)."""

from __future__ import annotations

import logging

import pytest
import torch
from nets import Door, make_net, train
from torch import nn

from hvd_adaptive import QSGD, Tuning

__all__ = ["test_replicas_after_a_state_was_loaded", "test_replicas_that_differ"]


def differing(net: nn.Module, rank: int, ranks: int, *names: str) -> None:
    """As if the last rank alone had loaded a checkpoint."""
    if rank == ranks - 1:
        with torch.no_grad():
            for name in names:
                net.get_parameter(name).view(-1)[5] += 1e-3


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m for m in caplog.messages if m.startswith("ranks have different parameters")]


@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_replicas_that_differ(
    door: Door, rank: int, ranks: int, worker: bool, frozen: bool, caplog
) -> None:
    """The first one is named, be it frozen as those of LoRA's base."""
    net = make_net()
    net[2].requires_grad_(not frozen)
    training = door(net, QSGD(bits=4, tuning=Tuning(worker=worker)))
    differing(net, rank, ranks, "2.weight", *([] if frozen else ["6.bias"]))
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        train(training, rank, range(3))
    (message,) = told(caplog)
    assert f"parameter 2.weight of rank {ranks - 1} differs from the first" in message
    assert ("and 1 more do" in message) != frozen


@pytest.mark.parametrize("by", ["all ranks", "one rank"])
def test_replicas_after_a_state_was_loaded(
    door: Door, rank: int, ranks: int, by: str, caplog
) -> None:
    """By any rank, and with the same step; changed settings compare nothing again."""
    net, compressor = make_net(), QSGD(bits=4)
    training = door(net, compressor)
    with caplog.at_level(logging.WARNING, "hvd_adaptive"):
        train(training, rank, range(2))
        differing(net, rank, ranks, "0.weight")
        compressor.set(bits=5)
        train(training, rank, [2])
        assert not told(caplog)
        if by == "all ranks" or rank == ranks - 1:
            compressor.load_state_dict(compressor.state_dict())
        train(training, rank, [3, 4, 5])
    (message,) = told(caplog)
    assert "parameter 0.weight of" in message
