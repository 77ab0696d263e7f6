"""Exchanges without compression, which a monitor measures."""

from __future__ import annotations

import time

import torch

from hvd_adaptive.run.monitored import REPEATS, stock_seconds

SLOW = {torch.float32: 0.02, torch.float16: 0.01}


class World:
    """Two ranks; the other one takes a second longer for float16."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[int], torch.dtype]] = []

    def average_all(self, tensors, name):
        self.sent += [([tensor.numel() for tensor in tensors], t.dtype) for t in tensors[:1]]
        time.sleep(SLOW[tensors[0].dtype] if tensors else 0.0)

    def gather_equal(self, values, name):
        return torch.stack([values, values + torch.tensor([0.0, 1.0])])


def test_both_precisions_are_timed_and_the_slowest_rank_counts():
    world = World()
    told = stock_seconds(world, [5, 7], "net", torch.device("cpu"))
    times = 1 + REPEATS
    assert world.sent == [([5, 7], torch.float32)] * times + [([5, 7], torch.float16)] * times
    assert told["float32"] >= 0.02 and told["float16"] >= 1.01
    assert set(stock_seconds(world, [], "net", torch.device("cpu"))) == {"float32", "float16"}
