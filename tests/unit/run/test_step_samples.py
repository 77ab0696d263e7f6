"""Which buckets a step samples for the level table (no Horovod: a stand-in for the binding)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from hvd_adaptive.exchange.allgather import AllgatherExchange
from hvd_adaptive.exchange.exchange import RankInfo
from hvd_adaptive.instances import Instance
from hvd_adaptive.layout import Member, build_layout
from hvd_adaptive.monitor.meter import StepMeter
from hvd_adaptive.run.step import Step
from hvd_adaptive.settings import Settings


class FakeBinding:
    """What Step needs to gather groups: settings, rank, and one staging buffer for each dtype."""

    def __init__(self, bucket_size: int, rank: int = 0) -> None:
        self.settings = Settings(bucket_size=bucket_size)
        self.world = SimpleNamespace(rank=rank)
        self.exchange, self.name = AllgatherExchange(RankInfo(4, rank)), "test"
        codec = SimpleNamespace(payloads=SimpleNamespace(check_device=lambda device: None))
        self.compressor = SimpleNamespace(
            _training=SimpleNamespace(instance=Instance(), meter=StepMeter()),
            parts=SimpleNamespace(default=codec, looks_for_zeros=False),
            settings=self.settings,
        )
        self.buffers: dict[torch.dtype, torch.Tensor] = {}

    def buffer(self, use, coordinates, dtype, device):
        if dtype not in self.buffers:
            self.buffers[dtype] = torch.empty(100_000, dtype=dtype)
        return self.buffers[dtype][:coordinates]


def step_of(
    sizes: list[int],
    bucket_size: int,
    most: int,
    rank: int = 0,
    number: int = 0,
    parts: tuple[str | None, ...] = (),
    arrived: tuple[int, ...] | None = None,
):
    """A step whose member i is filled with distinct numbers, and all of them end to end."""
    members = [Member(f"{i:03}", (n,), torch.float32) for i, n in enumerate(sizes)]
    for i, label in enumerate(parts):
        members[i] = dataclasses.replace(members[i], part=label)
    layout = build_layout(
        members, min_numel=0, bucket_size=bucket_size, tail="quantize", most_coordinates=most
    )
    step = Step(FakeBinding(bucket_size, rank), layout, number)
    values = torch.arange(1.0, sum(sizes) + 1)
    for slot, part in enumerate(values.split(sizes)):
        if arrived is None or slot in arrived:
            step.arrive(slot, part, is_gradient=False)
    return step, values


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_buckets_without_replacement(count):
    """24 full ones and one of 50 coordinates."""
    step, values = step_of([700, 800, 900, 50], 100, 1000)
    buckets = step.samples(count)
    assert len(buckets) == min(count, 25)
    starts = [int(bucket[0]) for bucket in buckets]
    assert len(set(starts)) == len(starts)
    for bucket in buckets:
        # Inside a group coordinates follow each other.
        assert torch.equal(bucket, torch.arange(bucket[0], bucket[0] + len(bucket)))
        assert len(bucket) == (50 if bucket[0] == 2401 else 100)
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


def test_each_part_draws_from_its_own_groups():
    sizes, parts = [500, 700, 300, 90, 400], ("a", "b", "a", "c", None)
    step, values = step_of(sizes, 100, 10_000, parts=parts)
    of_member = dict(enumerate(values.split(sizes)))
    assert step.parts == ["a", "b", "c"]
    drawn = {label: step.samples(1000, label) for label in step.parts}
    assert torch.equal(torch.cat(drawn["a"]), torch.cat([of_member[0], of_member[2]]))
    assert torch.equal(torch.cat(drawn["b"]), of_member[1])
    assert torch.equal(torch.cat(drawn["c"]), of_member[3]), "a shorter one where no other is"
    assert step.samples(1000) == [], "the default part has full precision only"


def test_parts_draw_with_different_numbers():
    step, _ = step_of([10_000, 10_000], 100, 10_000, parts=("a", "b"))
    drawn = {p: [int(bucket[0]) % 10_000 for bucket in step.samples(10, p)] for p in ("a", "b")}
    assert drawn["a"] != drawn["b"]


def test_parts_of_a_step_are_those_that_arrived():
    """The others (sparse parameters) are not sent; without any the default part is asked."""
    assert step_of([500] * 3, 100, 1000, parts=("a", "b", "c"), arrived=(0, 2))[0].parts == [
        "a",
        "c",
    ]
    assert step_of([500] * 2, 100, 1000, parts=("a", None), arrived=(1,))[0].parts == [""]
