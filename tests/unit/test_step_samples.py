"""Which buckets a step samples for the level table (no Horovod: a stand-in for the binding)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive.fusion.layout import Member, build_layout
from hvd_adaptive.fusion.step import Step
from hvd_adaptive.settings import Settings


class FakeBinding:
    """What Step needs to gather groups: settings, rank, and one staging buffer for each dtype."""

    def __init__(self, bucket_size: int, rank: int = 0) -> None:
        self.settings = Settings(bucket_size=bucket_size)
        self.world = SimpleNamespace(rank=rank)
        self.buffers: dict[torch.dtype, torch.Tensor] = {}

    def staging(self, coordinates, dtype, device):
        if dtype not in self.buffers:
            self.buffers[dtype] = torch.empty(100_000, dtype=dtype)
        return self.buffers[dtype][:coordinates]


def step_of(sizes: list[int], bucket_size: int, most: int, rank: int = 0, number: int = 0):
    """A step whose member i is filled with distinct numbers, and all of them end to end."""
    members = [Member(f"{i:03}", (n,), torch.float32) for i, n in enumerate(sizes)]
    layout = build_layout(
        members, min_numel=0, bucket_size=bucket_size, tail="quantize", most_coordinates=most
    )
    step = Step(FakeBinding(bucket_size, rank), layout, number, hold=True)
    values = torch.arange(1.0, sum(sizes) + 1)
    for slot, part in enumerate(values.split(sizes)):
        step.arrive(slot, part)
    return step, values


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_full_buckets_without_replacement(count):
    step, values = step_of([700, 800, 900, 50], 100, 1000)
    buckets = step.samples(count)
    assert len(buckets) == min(count, 24)
    starts = [int(bucket[0]) for bucket in buckets]
    assert len(set(starts)) == len(starts)
    for bucket in buckets:
        # Inside a group coordinates follow each other.
        assert torch.equal(bucket, torch.arange(bucket[0], bucket[0] + 100))
        assert float(bucket[-1]) <= values.numel()


def test_ranks_and_steps_draw_differently_and_repeat():
    draws = {}
    for rank, number in ((0, 0), (0, 0), (1, 0), (0, 1)):
        step, _ = step_of([10_000], 100, 10_000, rank, number)
        drawn = tuple(int(bucket[0]) for bucket in step.samples(10))
        assert draws.setdefault((rank, number), drawn) == drawn
    assert len(set(draws.values())) == 3


def test_shorter_buckets_where_no_group_has_a_full_one():
    """Groups share one staging buffer: each sample must be a copy of its own."""
    step, values = step_of([30, 40, 50], 64, 64)
    buckets = step.samples(10)
    assert torch.equal(torch.cat(buckets).sort().values, values)
