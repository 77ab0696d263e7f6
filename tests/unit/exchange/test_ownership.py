"""What is sent is not written to before it has left, in whole steps of several ranks."""

from __future__ import annotations

import pytest
import torch
from late_ranks import run

from hvd_adaptive import ALQ, QSGD, Hierarchical, ScatterReduce
from hvd_adaptive.coding.payload import OwnedBuffer
from hvd_adaptive.transport.collectives import AllGather, AllToAll

pytestmark = pytest.mark.many
SHAPES = {
    "biases": [(40, 50), (40,)] * 8,
    "small": [(10, 10), (10,)] * 20,
    "one": [(200, 100)],
}
# How many coordinates a group has, about: some have several members, some are one's alone.
FUSION = {"biases": 40_000, "small": 2_000, "one": 20_000}
EXCHANGES = {
    "allgather": {"exchange": "allgather"},
    "scatter_reduce": {"exchange": ScatterReduce(second_stage_bits=8)},
    "alone": {"exchange": Hierarchical(ranks_per_node=1, second_stage_bits=8)},
    "pairs": {"exchange": Hierarchical(ranks_per_node=2, second_stage_bits=8)},
    "all": {"exchange": Hierarchical(ranks_per_node=4, second_stage_bits=8)},
}
SETTINGS = {
    "defaults": {},
    "warm-up": {"warmup_steps": 2},
    "quantised": {"min_numel": 0},
    "full-tail": {"tail": "full", "bucket_size": 100},
    "bits": {"parameter_bits": {"w1*": 7, "w2*": None}},
}


def drawn(shapes, ranks, steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        [[torch.randn(s, generator=generator).to(dtype) for s in shapes] for _ in range(ranks)]
        for _ in range(steps)
    ]


def check(shapes, exchange, ranks, *, fusion=1 << 22, dtype=torch.float32, direct=False, **own):
    """Every rank's every average beside the exact one: within the two stages' steps, which are a
    127th of the largest gradient each, and the dtype's rounding."""
    keywords = {"bits": 8, "norm": "linf", "bucket_size": 256}
    keywords |= {"fusion_bytes": fusion} | exchange | own
    gradients = drawn(shapes, ranks, 2, dtype)
    exact = [
        [sum(g.double() for g in of_one) / ranks for of_one in zip(*of_step, strict=True)]
        for of_step in gradients
    ]
    largest = max(float(g.abs().max()) for step in gradients for rank in step for g in rank)
    bound = largest * (2.05 / 127 + 4 * torch.finfo(dtype).eps)
    for of_rank in run(lambda: QSGD(**keywords), shapes, gradients, dtype=dtype, direct=direct):
        for step, (found, wanted) in enumerate(zip(of_rank, exact, strict=True)):
            assert not isinstance(found, Exception), found
            for slot, (got, want) in enumerate(zip(found, wanted, strict=True)):
                error = float((got.double() - want).abs().max())
                assert error < bound, (step, slot, error)


@pytest.mark.many
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("model", SHAPES)
def test_averages_are_exact_but_for_quantising(model, exchange, settings):
    check(SHAPES[model], EXCHANGES[exchange], 4, fusion=FUSION[model], **SETTINGS[settings])


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_dtypes_and_direct_messages(exchange, dtype, direct):
    check(SHAPES["biases"], EXCHANGES[exchange], 4, fusion=40_000, dtype=dtype, direct=direct)


@pytest.mark.parametrize("exchange", ["allgather", "scatter_reduce", "alone"])
def test_two_and_three_ranks(exchange):
    for ranks in (1, 2, 3):
        check(SHAPES["biases"], EXCHANGES[exchange], ranks, fusion=40_000)


def test_steps_with_tables_are_those_of_one_group_or_many():
    """Coded payloads, of lengths of their own."""
    shapes, exchange = SHAPES["biases"], EXCHANGES["pairs"]
    results = []
    for fusion in (40_000, 1 << 22):
        gradients = drawn(shapes, 4, 1)
        found = run(
            lambda fusion=fusion: ALQ(bits=8, coding="huffman", fusion_bytes=fusion, **exchange),
            shapes,
            gradients,
        )
        results.append(found)
        exact = [sum(g) / 4 for g in zip(*drawn(shapes, 4, 1)[0], strict=True)]
        for (of_step,) in found:
            for got, want in zip(of_step, exact, strict=True):
                assert (got - want).norm() < 0.2 * want.norm()


def test_borrowed_memory_is_refused():
    lent = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TypeError, match="OwnedBuffer"):
        AllGather(lent)
    with pytest.raises(TypeError, match="OwnedBuffer"):
        AllToAll([OwnedBuffer(8), lent])


def test_memory_to_send_is_its_own():
    lent = torch.arange(6, dtype=torch.float32)
    copy = OwnedBuffer.copy_of(lent.view(2, 3).T)
    lent.zero_()
    wanted = torch.tensor([0.0, 3, 1, 4, 2, 5])
    assert torch.equal(copy.bytes.view(torch.float32), wanted)
    whole = OwnedBuffer(10)
    part = whole.part(4, 8)
    part.bytes.fill_(7)
    assert whole.bytes[4:8].eq(7).all() and part.size == 4 and whole.size == 10
