"""Exchanges without compression, which a monitor measures."""

from __future__ import annotations

import time

import pytest
import torch

from hvd_adaptive import Monitor
from hvd_adaptive.run.monitored import REPEATS, stock_seconds

SLOW = {torch.float32: 0.02, torch.float16: 0.01}


class World:
    """Two ranks; the other one takes a second longer for float16."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[int], torch.dtype]] = []

    def average_all(self, tensors, name):
        assert name == "net.stock"
        self.sent.append(([tensor.numel() for tensor in tensors], tensors[0].dtype))
        time.sleep(SLOW[tensors[0].dtype])

    def gather_equal(self, values, name):
        return torch.stack([values, values + torch.tensor([0.0, 1.0])])


def test_both_precisions_are_timed_and_the_slowest_rank_counts():
    world = World()
    told = stock_seconds(world, [5, 7], "net", torch.device("cpu"))
    assert [dtype for _, dtype in world.sent] == [torch.float32] * (1 + REPEATS) + [
        torch.float16
    ] * (1 + REPEATS)
    assert all(sizes == [5, 7] for sizes, _ in world.sent)
    assert told["float32"] >= 0.02 and told["float16"] >= 1.01


def test_a_model_without_gradients_takes_no_time():
    class Nobody(World):
        def average_all(self, tensors, name):
            assert not tensors

    assert set(stock_seconds(Nobody(), [], "net", torch.device("cpu"))) == {"float32", "float16"}


def test_compare_is_a_flag():
    with pytest.raises(ValueError, match=r"compare=1: must be True or False"):
        Monitor(compare=1)
