"""Which buckets a step samples for the level tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_errors import bucket_errors
from feedback_steps import OneRank

from hvd_adaptive import QSGD
from hvd_adaptive.layout import Group
from hvd_adaptive.run.draws import draw_buckets

# Groups of full buckets of 16, some with a partial one at the end.
SIZE = 16
QUANTIZED = (5 * 16 + 7, 3 * 16, 9, 20 * 16 + 1, 2 * 16 + 15)


@pytest.fixture
def drawn_from():
    """Groups of very different energies and heavy tails, and a function that draws from them."""
    everything = [Group(torch.float32, quantized, 3) for quantized in QUANTIZED]
    flats = {}
    for index, group in enumerate(everything):
        values = torch.randn(group.quantized, generator=torch.Generator().manual_seed(index)) ** 3
        flats[id(group)] = torch.cat([(1 + 3 * index) * values, torch.full((3,), 1e9)])

    def draw(count: int, key: int):
        flat_of = lambda group: flats[id(group)]  # noqa: E731
        return draw_buckets(everything, flat_of, bucket_size=SIZE, count=count, key=key)

    return [b for g in everything for b in flats[id(g)][: g.quantized].split(SIZE)], draw


@pytest.mark.parametrize("count", [3, 33, 100])
def test_sums_are_unbiased(drawn_from, count):
    """Of squared norms, of errors, of coordinates: 5 sigma of 1,000 draws; weights are 1 on
    average over the buckets there are."""
    buckets, draw = drawn_from
    levels, total = np.array([-1, -0.5, -0.1, 0.1, 0.5, 1]), len(buckets)

    def figures(bucket: torch.Tensor) -> np.ndarray:
        error = bucket_errors(bucket.numpy(), levels, SIZE)[0]
        return np.array([1.0, float(bucket.double().square().sum()), error, len(bucket)])

    known = {tuple(bucket.tolist()): figures(bucket) for bucket in buckets}
    assert total == len(known) == 34
    found = []
    for key in range(1000 if count < total else 2):
        drawn = draw(count, key)
        names = [tuple(bucket.tolist()) for bucket in drawn]
        assert len(set(names)) == len(drawn.weights) == min(count, total)
        rows = [weight * known[name] for name, weight in zip(names, drawn.weights, strict=True)]
        found.append(np.sum(rows, axis=0) * total / len(drawn))
    found, exact = np.array(found), sum(known.values())
    spread = found.std(axis=0, ddof=1) / np.sqrt(len(found))
    assert (np.abs(found.mean(axis=0) - exact) <= 5 * spread + 1e-9 * exact).all()


@pytest.mark.parametrize("count", [4, 20])
def test_partial_buckets_are_drawn_at_least_as_often(drawn_from, count):
    _, draw = drawn_from
    sizes = [len(bucket) for key in range(200) for bucket in draw(count, key)]
    partial = sum(size < SIZE for size in sizes)
    assert partial / 4 >= (len(sizes) - partial) / 30
    group = Group(torch.float32, 1000 * 16 + 5)
    flat = torch.randn(group.quantized, generator=torch.Generator().manual_seed(0))
    for key in range(20):
        drawn = draw_buckets([group], lambda g: flat, bucket_size=16, count=count, key=key)
        assert torch.equal(drawn[-1], flat[-5:]) and len(drawn) == count, "the only one: always"


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


def test_ranks_steps_and_parts_draw_differently_and_repeat():
    step, _ = step_of([10_000, 10_000], 100, 10_000, bits={"a": 4, "b": 5})
    one, other = ([int(bucket[0]) % 10_000 for bucket in step.samples(10, p)] for p in step.parts)
    assert one != other
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


def test_parts_of_a_step_are_those_that_arrived():
    """The others (sparse parameters) are not sent; without any the default part is asked."""
    step, _ = step_of([500] * 3, 100, 1000, bits={"a": 4, "b": 5, "c": 6}, arrived=(0, 2))
    assert step.parts == ["bits=4", "bits=6"]
    step, _ = step_of([500] * 2, 100, 1000, bits={"a": 4, "b": None}, arrived=(1,))
    assert step.parts == [""]


def test_a_full_bucket_is_drawn_among_many_partial_ones():
    groups = [Group(torch.float32, 16, 0), *(Group(torch.float32, 9, 0) for _ in range(400))]
    drawn = draw_buckets(
        groups, lambda group: torch.ones(group.quantized), bucket_size=SIZE, count=10, key=0
    )
    assert sorted(map(len, drawn)) == [9] * 9 + [16]
    assert sum(drawn.weights) == pytest.approx(10)
