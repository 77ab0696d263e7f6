"""Locate coordinates in words, and words and buckets under a tile of coordinates, in Triton.

A segment is the least run of coordinates that begins and ends with whole words in every lane: a
block of fixed width, or some rows of radix packing (kernels/packing.py). A tile is some segments
times 16 lanes, one thread for each lane; a thread makes all words of its lane. In both packings a
row has some digits in each lane, which make a unit of ``width`` bits, sum_digit code *
base**digit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import QUARTERS, ROWS, Packing
from hvd_adaptive.kernels.triton.launch import WARPS, launch

_LEAST_ROWS = 8
_TILE = 1024

# How the buckets lie on the segments. ALIGNED: each segment lies in one bucket. LONG: a segment
# holds one boundary at most. SHORT: a segment holds any number of buckets.
ALIGNED, LONG, SHORT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Tensor(NamedTuple):
    """Hold a pointer to ``n`` coordinates, and the result of ``magic`` for their buckets."""

    x: Any
    n: Any
    bucket_size: Any
    magic: Any


@dataclass(frozen=True)
class Layout:
    """Hold constants of kernels, LAYOUT there. fixed: of fixed width, whose last block has shorter
    quarters. buckets: how they lie on the segments. tile: the segments of a program.
    """

    fixed: bool
    rows: int
    digits: int
    base: int
    width: int
    buckets: int
    tile: int

    @property
    def coordinates(self) -> int:
        """Return the coordinates of a segment."""
        return 16 * self.rows * self.digits


@functools.lru_cache(maxsize=256)
def layout_of(packing: Packing, bucket_size: int, warps: int = WARPS) -> Layout:
    """Return the layout of a packing and of buckets."""
    if packing.digits == 1:
        bits = packing.width
        unit = ROWS, QUARTERS, 1 << bits, QUARTERS * bits
    else:
        rows = max(_LEAST_ROWS, 32 // math.gcd(packing.width, 32))
        unit = rows, packing.digits, packing.alphabet, packing.width
    coordinates = 16 * unit[0] * unit[1]
    if bucket_size % coordinates == 0:
        buckets = ALIGNED.value
    else:
        buckets = LONG.value if bucket_size >= coordinates else SHORT.value
    return Layout(packing.digits == 1, *unit, buckets, 2 * warps)


def magic(bucket_size: int) -> int:
    """Return 2**31 / bucket_size, rounded up, by which ``crossed`` divides if buckets are SHORT."""
    return min(-(-(1 << 31) // bucket_size), 1 << 31)


def for_each(action: Any, on: torch.Tensor, bucket_size: int, *args: Any, **constants: Any) -> None:
    """Launch ``action(n, bucket_size, *args, TILE, INSIDE, ...)`` on tiles of ``on``."""
    constants |= {"TILE": _TILE, "INSIDE": bucket_size % _TILE == 0}
    launch(action, -(-on.numel() // _TILE), on, on.numel(), bucket_size, *args, **constants)


@triton.jit
def coordinates_left(segment, n, SIZE: tl.constexpr):
    """Return the coordinates (int32, 0 to SIZE) that segments (int64) have."""
    return tl.minimum(tl.maximum(n - segment * SIZE, 0), SIZE).to(tl.int32)


@triton.jit
def coordinate(k, digit, segment, left, lane, LAYOUT: tl.constexpr):
    """Return a digit's place in the segment (int32) and tensor (int64), and whether it exists."""
    if LAYOUT.fixed:
        quarter = ((left + 63) // 64) * 16
        place = digit * quarter + lane
        there = k * 16 < tl.minimum(quarter, left - place)
        place += k * 16
    else:
        place = (k * LAYOUT.digits + digit) * 16 + lane
        there = place < left
    return place, segment * LAYOUT.coordinates + place, there


@triton.jit
def words_left(segment, lane_words, WORDS: tl.constexpr):
    """Return the words (int32, 0 to WORDS) that a lane has in segments (int64)."""
    return tl.minimum(tl.maximum(lane_words - segment * WORDS, 0), WORDS).to(tl.int32)


@triton.jit
def bucket_under(segment, bucket_size, SIZE: tl.constexpr):
    """Return the bucket of the segments' first coordinates, and their places in it (both int64)."""
    first = segment * SIZE
    bucket = first // bucket_size
    return bucket, first - bucket * bucket_size


@triton.jit
def crossed(place, within, bucket_size, magic, BUCKETS: tl.constexpr):
    """Return how many buckets after the segment's first one a coordinate lies: int32.

    Args:
        place: Place of the coordinate in the segment (int32).
        within: Place of the segment's first coordinate in its bucket (int64).

    SHORT: with t = within + place < 2**14 and buckets of b < 2**13 coordinates,
    (2 t + 1) (2**31 / b + e) / 2**32 for 0 <= e < 1 has the same whole part as t / b, since (2 t +
    1) b < 2**31.
    """
    if BUCKETS == ALIGNED:
        return place * 0
    if BUCKETS == LONG:
        room = tl.minimum(bucket_size - within, 1 << 20).to(tl.int32)  # more than any segment
        return (place >= room).to(tl.int32)
    t = (within.to(tl.int32) + place).to(tl.uint32)
    return tl.umulhi(2 * t + 1, magic.to(tl.uint32)).to(tl.int32)


@triton.jit
def place_of(n, bucket_size, TILE: tl.constexpr, INSIDE: tl.constexpr):
    """Return a tile's coordinates (int64), whether they exist, and their buckets (int64; one if
    INSIDE).
    """
    first = tl.program_id(0).to(tl.int64) * TILE
    i = first + tl.arange(0, TILE)
    bucket = first // bucket_size + tl.zeros((TILE,), tl.int64) if INSIDE else i // bucket_size
    return i, i < n, bucket
