"""Define the runs of buckets, dithers and random streams of quantized compressive sampling."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.random import Inside

# An integer h < 2**24 is the dither h * 2**-24 - DITHER_OFFSET, symmetric in (-1/2, 1/2) and exact
# in float32. From 2**23 on it is the sign -1.
DITHER_OFFSET = 0.5 - 2.0**-25
NEGATIVE_FROM = 2.0**23


@dataclass(frozen=True)
class Run:
    """Describe neighbouring buckets of a tensor that are projected alike."""

    start: int
    stop: int  # of their coordinates; if the last bucket is short, zeros fill it up
    first: int  # number of their first bucket in the tensor
    order: int  # n, coordinates of a bucket
    rows: int  # k <= n, its measurements
    weight: float  # alpha (Eq. 8)

    @property
    def buckets(self) -> int:
        return -(-(self.stop - self.start) // self.order)

    @property
    def codes(self) -> int:
        return self.buckets * self.rows


def streams(key: int, run: Run) -> tuple[int, int]:
    """Return the streams of a run's signs and dithers; in them bucket ``run.first`` counts as 0."""
    signs = random.stream_key(key, Inside.SIGNS, run.first)
    return signs, random.stream_key(key, Inside.DITHERS, run.first)
