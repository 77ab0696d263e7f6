"""Treat coordinates one by one in Triton, a tile of them in each program."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.random import signed
from hvd_adaptive.kernels.triton.launch import launch
from hvd_adaptive.kernels.triton.layout import ALIGNED, LONG, SHORT, bucket_under, crossed, magic
from hvd_adaptive.kernels.triton.random import COUNTER, bucket_key, integer24

_TILE = 1024


def for_each(
    action: Any, on: torch.Tensor, n: int, bucket_size: int, key: int, *args: Any, **constants: Any
) -> None:
    """Launch ``action(n, bucket_size, magic, stream, *args, TILE, BUCKETS, **constants)`` on tiles
    of ``n`` coordinates on the device of ``on``."""
    args = n, bucket_size, magic(bucket_size), signed(key), *args
    constants |= {"TILE": _TILE, "BUCKETS": buckets_on(bucket_size, _TILE)}
    launch(action, -(-n // _TILE), on, *args, **constants)


def buckets_on(bucket_size: int, tile: int) -> int:
    """Return how buckets of this size lie on tiles of ``tile`` coordinates, 1024 at most."""
    if bucket_size % tile == 0:
        return ALIGNED.value
    return LONG.value if bucket_size >= tile else SHORT.value


@triton.jit
def own_place(n, bucket_size, magic, TILE: tl.constexpr, BUCKETS: tl.constexpr):
    """Return ``place_of`` of the program's own tile of coordinates."""
    tile = tl.program_id(0).to(tl.int64)
    return place_of(tile, n, bucket_size, magic, TILE, BUCKETS)


@triton.jit
def place_of(tile, n, bucket_size, magic, TILE: tl.constexpr, BUCKETS: tl.constexpr):
    """Return the coordinates' places in the tensor (int64), whether they exist, their buckets
    (int64), and their places in these (uint32, modulo 2**32). tile: int64.
    """
    bucket, within = bucket_under(tile, bucket_size, TILE)
    place = tl.arange(0, TILE)
    i = tile * TILE + place
    over = crossed(place, within, bucket_size, magic, BUCKETS)
    return i, i < n, bucket + over, (within - over * bucket_size + place).to(tl.uint32)


@triton.jit
def own_integer(stream, bucket, place):
    """Return integers below 2**24 (int32) of coordinates at places of buckets."""
    low, high = bucket_key(stream, bucket)
    return integer24(place * COUNTER + low, high)
