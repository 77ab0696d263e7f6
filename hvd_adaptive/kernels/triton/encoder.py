"""Round stochastically and pack in Triton, with norms in the same launch if buckets allow it.

A scheme is two constants of the kernels. ``PREPARE(bucket, there, state, OPTIONS)`` returns a tuple
that belongs to a bucket. ``CODE(v, counter, high, about, state, there, OPTIONS)`` returns the codes
(uint32) of coordinates v. counter, high: for uniforms.uniform24. about: the tuple of PREPARE.
there: which coordinates exist. state: a tuple of tensors and floats, OPTIONS one of integers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import Packing
from hvd_adaptive.kernels.random import signed
from hvd_adaptive.kernels.triton.launch import kernel, launch
from hvd_adaptive.kernels.triton.layout import (
    ALIGNED,
    LONG,
    Tensor,
    bucket_under,
    coordinate,
    coordinates_left,
    crossed,
    layout_of,
    magic,
    words_left,
)
from hvd_adaptive.kernels.triton.uniforms import COUNTER, bucket_key


class Scheme(NamedTuple):
    """Hold PREPARE, CODE, their arguments, the number of buckets, and the random stream."""

    prepare: Any
    code: Any
    state: Any
    options: Any
    buckets: Any
    stream: Any


class Tile(NamedTuple):
    """Hold segments (int64), lanes, the buckets under the segments' first coordinates, these
    coordinates' places in the buckets, and ``_about`` of these and of the next buckets.
    """

    segment: Any
    lane: Any
    bucket: Any
    within: Any
    of_first: Any
    of_next: Any


def pack(
    flat: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    packing: Packing,
    key: int,
    state: tuple,
    **scheme: Any,
) -> None:
    """Fill ``words`` (int32) with the codes of ``flat`` (float32, (n,)). scheme: PREPARE, CODE and
    OPTIONS; ``state``, which must not be empty, is an argument of these.
    """
    layout, n = layout_of(packing, bucket_size), flat.numel()
    buckets = bucket_size, -(-n // bucket_size), magic(bucket_size)
    args = flat, words, n, *buckets, packing.words(n) // 16, signed(key), state
    programs = -(-n // (layout.tile * layout.coordinates))
    launch(_pack_kernel, programs, flat, *args, LAYOUT=layout, **scheme)


@kernel
def _pack_kernel(
    x,
    words,
    n: tl.int64,
    bucket_size: tl.int64,
    buckets: tl.int64,
    magic: tl.int64,
    lane_words: tl.int64,
    stream: tl.int64,
    state,
    LAYOUT: tl.constexpr,
    PREPARE: tl.constexpr,
    CODE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Pack a tile of segments in each program."""
    # Assigning a tuple would turn its constants into tensors.
    _pack_segments(
        Tensor(x, n, bucket_size, magic),
        words,
        lane_words,
        Scheme(PREPARE, CODE, state, OPTIONS, buckets, stream),
        LAYOUT,
    )


@triton.jit
def _pack_segments(tensor, words, lane_words, scheme, LAYOUT: tl.constexpr):
    thread = tl.arange(0, 16 * LAYOUT.tile)
    segment = tl.program_id(0).to(tl.int64) * LAYOUT.tile + thread // 16
    bucket, within = bucket_under(segment, tensor.bucket_size, LAYOUT.coordinates)
    of_first = _about(bucket, within, scheme)
    of_next = _about(bucket + 1, within - tensor.bucket_size, scheme)
    tile = Tile(segment, thread % 16, bucket, within, of_first, of_next)
    pack_tile(tensor, tile, words, lane_words, scheme, LAYOUT)


@triton.jit
def nothing(bucket, there, state, OPTIONS: tl.constexpr):
    """PREPARE nothing, for schemes whose codes do not depend on buckets."""
    return (bucket,)


@triton.jit
def _about(bucket, within, scheme):
    """Return the counter (uint32) of the coordinate ``-within`` places behind the buckets' first
    one, the high key, and the tuple of PREPARE.
    """
    low, high = bucket_key(scheme.stream, bucket)
    about = scheme.prepare(bucket, bucket < scheme.buckets, scheme.state, scheme.options)
    return within.to(tl.uint32) * COUNTER + low, high, about


@triton.jit
def pack_tile(tensor, tile, words, lane_words, scheme, LAYOUT: tl.constexpr):
    """Store the words of lanes (int32) of segments, row by row: a lane's bits are gathered in 64
    bits, whose lower word is written out when it is full.
    """
    ROWS: tl.constexpr = LAYOUT.rows
    WIDTH: tl.constexpr = LAYOUT.width
    WORDS: tl.constexpr = ROWS * WIDTH // 32
    left = coordinates_left(tile.segment, tensor.n, LAYOUT.coordinates)
    own_words = words_left(tile.segment, lane_words, WORDS)
    target = words + tile.segment * (WORDS * 16) + tile.lane
    bits = tl.zeros(tile.segment.shape, tl.uint64)
    if LAYOUT.fixed:
        # Stores come last: loads could not pass them.
        full = ()
        for k in tl.static_range(ROWS):
            unit = _unit(k, left, tensor, tile, scheme, LAYOUT)
            bits = bits | (unit.to(tl.uint64) << (k * WIDTH % 32))
            if k * WIDTH % 32 + WIDTH >= 32:
                full = full + (bits,)
                bits = bits >> 32
        for word in tl.static_range(WORDS):
            value = full[word].to(tl.uint32).to(tl.int32, bitcast=True)
            tl.store(target + word * 16, value, mask=word < own_words)
    else:
        for k in range(ROWS):
            unit = _unit(k, left, tensor, tile, scheme, LAYOUT)
            word, shift = k * WIDTH // 32, k * WIDTH % 32
            bits = bits | (unit.to(tl.uint64) << shift)
            value = bits.to(tl.uint32).to(tl.int32, bitcast=True)
            ends = shift + WIDTH >= 32
            tl.store(target + word * 16, value, mask=(word < own_words) & ends)
            bits = tl.where(ends, bits >> 32, bits)


@triton.jit
def _unit(k, left, tensor, tile, scheme, LAYOUT: tl.constexpr):
    """Build the unit of row k from its last digit to its first; missing coordinates are 0."""
    DIGITS: tl.constexpr = LAYOUT.digits
    unit = tl.zeros(tile.segment.shape, tl.uint32)
    for digit in tl.static_range(DIGITS):
        place, i, there = coordinate(k, DIGITS - 1 - digit, tile.segment, left, tile.lane, LAYOUT)
        v = tl.load(tensor.x + i, mask=there, other=0.0)
        if LAYOUT.buckets == ALIGNED:
            own = tile.of_first
        else:
            over = crossed(place, tile.within, tensor.bucket_size, tensor.magic, LAYOUT.buckets)
            if LAYOUT.buckets == LONG:
                own = _chosen(over > 0, tile.of_next, tile.of_first)
            else:
                within = tile.within - over * tensor.bucket_size
                own = _about(tile.bucket + over, within, scheme)
        counter = place.to(tl.uint32) * COUNTER + own[0]
        code = scheme.code(v, counter, own[1], own[2], scheme.state, there, scheme.options)
        unit = unit * LAYOUT.base + tl.where(there, code, 0)
    return unit


@triton.jit
def _chosen(condition, a, b):
    """Choose between the results of ``_about`` for two buckets."""
    PARTS: tl.constexpr = len(a[2])
    about = ()
    for part in tl.static_range(PARTS):
        about = about + (tl.where(condition, a[2][part], b[2][part]),)
    return tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1]), about
