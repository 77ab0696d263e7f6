"""The trip of a group on one rank: from its gradient to the average, and what it leaves behind."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from feedback_steps import OneRank, gradients

from hvd_adaptive import QSGD
from hvd_adaptive.run.trip import Trips


class Kept:
    """Gradients that remember what a trip has read."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat, self.read = flat, []

    def gather(self, index, changed):
        flat = self.flat.clone()
        self.read.append((weakref.ref(flat), changed))
        return flat

    def buffer(self, use, coordinates, dtype, device):
        return torch.full((coordinates,), torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [None, 0.5])
def test_coordinates_are_not_kept_while_the_group_is_under_way(weight, dtype):
    compressor = QSGD(bits=4, bucket_size=64, min_numel=10, error_feedback=weight)
    rank, kept = OneRank(compressor, [700], [dtype]), Kept(torch.randn(700).to(dtype))
    shared = {"meter": compressor._training.meter, "residuals": compressor._training.residuals}
    if weight is not None:
        shared["residuals"].lay_out(rank.layout, 0, 1)
    trip = Trips(compressor, rank.exchange, rank.layout, 0, kept, **shared).trip(0, 1.0)
    assert not kept.read, "nothing is read before it starts"
    next(trip)
    gc.collect()
    ((flat, changed),) = kept.read
    assert flat() is None and changed == (weight is not None)


@pytest.mark.parametrize("fusion", [None, 512])
def test_a_kept_average_counts_when_its_messages_are_gone(fusion):
    """Averages of gradients that must not be written to are kept, float32, until the step ends."""
    sizes = [5000, 700, 3000]
    compressor = QSGD(bits=4, bucket_size=128, min_numel=10)
    rank = OneRank(compressor, sizes, fusion=fusion)
    for number in range(2):
        rank.step(gradients(sizes, number))
    assert compressor.report()["peak_bytes"] == 4 * sum(sizes)


def test_seconds_are_parts_of_the_step():
    compressor = QSGD(bits=4, bucket_size=128, min_numel=10)
    rank = OneRank(compressor, [5000, 700], fusion=512)
    begin = time.perf_counter()
    rank.step(gradients([5000, 700], 0))
    elapsed = time.perf_counter() - begin
    report = compressor.report()
    seconds = [report[f"{part}_s"] for part in ("encode", "exchange", "decode")]
    assert min(seconds) > 0 and sum(seconds) < elapsed
