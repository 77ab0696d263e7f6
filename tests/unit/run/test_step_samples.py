"""Which buckets a step samples for the level table."""

from __future__ import annotations

import pytest
import torch
from feedback_steps import OneRank

from hvd_adaptive import QSGD


def step_of(sizes, bucket_size, most, rank=0, number=0, bits=None, arrived=None):
    """A step whose members hold distinct numbers, and all of them end to end.

    bits: the members' parts.  arrived: the slots of which gradients have arrived.
    """
    compressor = QSGD(bucket_size=bucket_size, min_numel=0, parameter_bits=bits)
    of_rank = OneRank(compressor, sizes, fusion=most)
    of_rank.world.rank = of_rank.exchange.rank = rank
    compressor.step = number
    step, values = of_rank.begin(), torch.arange(1.0, sum(sizes) + 1)
    for slot, part in enumerate(values.split(sizes)):
        if arrived is None or slot in arrived:
            step.arrive(slot, part.clone(), is_gradient=False)
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
    sizes, bits = [500, 700, 300, 90, 400], {"[ac]": 4, "b": 5, "d": 6, "e": None}
    step, values = step_of(sizes, 100, 10_000, bits=bits)
    a, b, c, d, _ = values.split(sizes)
    assert step.parts == ["bits=4", "bits=5", "bits=6"]
    drawn = {label: torch.cat(step.samples(1000, label)) for label in step.parts}
    assert torch.equal(drawn["bits=4"], torch.cat([a, c]))
    assert torch.equal(drawn["bits=5"], b)
    assert torch.equal(drawn["bits=6"], d), "a shorter one where no other is"
    assert step.samples(1000) == [], "the default part has full precision only"


def test_parts_draw_with_different_numbers():
    step, _ = step_of([10_000, 10_000], 100, 10_000, bits={"a": 4, "b": 5})
    drawn = [[int(bucket[0]) % 10_000 for bucket in step.samples(10, p)] for p in step.parts]
    assert len(drawn) == 2 and drawn[0] != drawn[1]


def test_parts_of_a_step_are_those_that_arrived():
    """The others (sparse parameters) are not sent; without any the default part is asked."""
    step, _ = step_of([500] * 3, 100, 1000, bits={"a": 4, "b": 5, "c": 6}, arrived=(0, 2))
    assert step.parts == ["bits=4", "bits=6"]
    step, _ = step_of([500] * 2, 100, 1000, bits={"a": 4, "b": None}, arrived=(1,))
    assert step.parts == [""]
