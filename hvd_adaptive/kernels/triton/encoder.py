"""Round stochastically and pack in Triton, with norms in the same launch if buckets allow it.

A scheme is three constants of the kernels. ``PREPARE(bucket, there, state, OPTIONS)`` returns a
tuple that belongs to a bucket. ``CODE(v, counter, high, about, state, i, there, RULE, OPTIONS)``
returns the codes (uint32) of coordinates v. counter, high: for random.uniform24. about: the tuple
of PREPARE. i: the coordinates' places in the tensor (int64); there: which of them exist. state: a
tuple of tensors and floats, OPTIONS one of integers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import Packing
from hvd_adaptive.kernels.tables import KernelTable
from hvd_adaptive.kernels.triton import quantize
from hvd_adaptive.kernels.triton.lanes import norm_of
from hvd_adaptive.kernels.triton.launch import WARPS, kernel, launch, multiprocessors, signed
from hvd_adaptive.kernels.triton.layout import (
    ALIGNED,
    LONG,
    bucket_under,
    coordinate,
    coordinates_left,
    crossed,
    magic,
    segments_of,
    words_left,
)
from hvd_adaptive.kernels.triton.random import COUNTER, bucket_key
from hvd_adaptive.kernels.triton.scan import clip_limits, fill_norms

# Norm and codes come from one launch if a bucket is whole tiles of a warp and not longer than this:
# a warp walks over the bucket, and reads it again from the L2 cache.
_TILE, _MOST_FUSED = 1024, 1 << 16
# Below so many buckets for each multiprocessor, so many warps share a bucket: each sums all of it
# (the tree's order allows no less), then packs a part.
_WARPS_OF_FEW = ((2, 8), (8, 4))


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    norm: str,
    table: KernelTable,
    key: int,
    clip: float | None = None,
    summing: bool = False,
) -> None:
    """See reference.tables.encode."""
    rule, numbers, sizes = quantize.rule_of(table, flat.device)
    limits = scales if clip is None else clip_limits(flat, bucket_size, clip)
    state = (scales, limits, *numbers)
    options = (table.thresholds, table.base, table.alphabet, int(clip is not None), *sizes)
    scheme = {"CODE": quantize.code_of, "RULE": rule, "OPTIONS": options}
    if table.packing.digits == 1 and bucket_size % _TILE == 0 and bucket_size <= _MOST_FUSED:
        load = scales.numel() / multiprocessors(flat.device)
        warps = next((warps for least, warps in _WARPS_OF_FEW if load < least), 1)
        launch(
            _fused_kernel,
            scales.numel(),
            flat,
            flat,
            words,
            flat.numel(),
            bucket_size,
            table.packing.words(flat.numel()) // 16,
            signed(key),
            state,
            num_warps=warps,
            SEGMENTS=2 * warps,
            LINF=norm == "linf",
            **scheme,
            **segments_of(table.packing).constants,
        )
        return
    fill_norms(flat, bucket_size, norm, None if clip is None else limits, scales)
    scheme["PREPARE"] = quantize.prepare
    pack(flat, words, bucket_size, table.packing, key, state, **scheme)


def pack(
    flat: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    packing: Packing,
    key: int,
    state: tuple,
    **scheme: Any,
) -> None:
    """Fill ``words`` (int32) with the codes of ``flat`` (float32, (n,)).

    Args:
        scheme: PREPARE, CODE, RULE and OPTIONS. ``state``, which must not be empty, is an argument
            of these.
    """
    segments, n = segments_of(packing), flat.numel()
    tile = 2 * WARPS
    launch(
        _pack_kernel,
        -(-n // (tile * segments.coordinates)),
        flat,
        flat,
        words,
        n,
        bucket_size,
        -(-n // bucket_size),
        magic(bucket_size),
        packing.words(n) // 16,
        signed(key),
        state,
        SEGMENTS=tile,
        BUCKETS=segments.buckets(bucket_size),
        **segments.constants,
        **scheme,
    )


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
    SEGMENTS: tl.constexpr,
    BUCKETS: tl.constexpr,
    FIXED: tl.constexpr,
    ROWS: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    WIDTH: tl.constexpr,
    PREPARE: tl.constexpr,
    CODE: tl.constexpr,
    RULE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Pack a tile of segments in each program."""
    thread = tl.arange(0, 16 * SEGMENTS)
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + thread // 16
    bucket, within = bucket_under(segment, bucket_size, 16 * ROWS * DIGITS)
    of_first = _about(bucket, within, buckets, stream, state, PREPARE, OPTIONS)
    of_next = _about(bucket + 1, within - bucket_size, buckets, stream, state, PREPARE, OPTIONS)
    _pack_tile(
        x,
        words,
        segment,
        thread % 16,
        n,
        bucket,
        within,
        of_first,
        of_next,
        bucket_size,
        buckets,
        magic,
        lane_words,
        stream,
        state,
        BUCKETS,
        FIXED,
        ROWS,
        DIGITS,
        BASE,
        WIDTH,
        PREPARE,
        CODE,
        RULE,
        OPTIONS,
    )


@kernel
def _fused_kernel(
    x,
    words,
    n: tl.int64,
    bucket_size: tl.int64,
    lane_words: tl.int64,
    stream: tl.int64,
    state,
    SEGMENTS: tl.constexpr,
    LINF: tl.constexpr,
    FIXED: tl.constexpr,
    ROWS: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    RULE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Compute a bucket's norm in each program, then its codes, a tile of segments at a time."""
    bucket = tl.program_id(0).to(tl.int64)
    size = tl.minimum(n - bucket * bucket_size, bucket_size)
    limit = tl.load(state[1] + bucket) if OPTIONS[3] else 0.0
    norm = norm_of(x, bucket * bucket_size, size, limit, LINF, OPTIONS[3])
    tl.store(state[0] + bucket, norm)
    inverse, usable = quantize.of_scale(norm)
    about = (inverse, usable, limit)
    low, high = bucket_key(stream, bucket)
    thread = tl.arange(0, 16 * SEGMENTS)
    for first in range(0, bucket_size, SEGMENTS * 512):
        within = first + (thread // 16).to(tl.int64) * 512
        # A tile may reach beyond its bucket: those segments belong to no tensor.
        segment = tl.where(within < bucket_size, (bucket * bucket_size + within) // 512, 1 << 50)
        of_bucket = (within.to(tl.uint32) * COUNTER + low, high, about)
        _pack_tile(
            x,
            words,
            segment,
            thread % 16,
            n,
            bucket,
            within,
            of_bucket,
            of_bucket,
            bucket_size,
            bucket,
            bucket,
            lane_words,
            stream,
            state,
            ALIGNED,
            FIXED,
            ROWS,
            DIGITS,
            BASE,
            WIDTH,
            CODE,
            CODE,
            RULE,
            OPTIONS,
        )


@triton.jit
def nothing(bucket, there, state, OPTIONS: tl.constexpr):
    """PREPARE nothing, for schemes whose codes do not depend on buckets."""
    return (bucket,)


@triton.jit
def _about(bucket, within, buckets, stream, state, PREPARE: tl.constexpr, OPTIONS: tl.constexpr):
    """Return the counter (uint32) of the coordinate ``-within`` places behind the buckets' first
    one, the high key, and the tuple of PREPARE.
    """
    low, high = bucket_key(stream, bucket)
    about = PREPARE(bucket, bucket < buckets, state, OPTIONS)
    return within.to(tl.uint32) * COUNTER + low, high, about


@triton.jit
def _pack_tile(
    x,
    words,
    segment,
    lane,
    n,
    bucket,
    within,
    of_first,
    of_next,
    bucket_size,
    buckets,
    magic,
    lane_words,
    stream,
    state,
    BUCKETS: tl.constexpr,
    FIXED: tl.constexpr,
    ROWS: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    WIDTH: tl.constexpr,
    PREPARE: tl.constexpr,
    CODE: tl.constexpr,
    RULE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Return the words of lanes (int32) of segments (int64), row by row: a lane's bits are gathered
    in 64 bits, whose lower word is written out when it is full.
    """
    WORDS: tl.constexpr = ROWS * WIDTH // 32
    left = coordinates_left(segment, n, 16 * ROWS * DIGITS)
    own_words = words_left(segment, lane_words, WORDS)
    target = words + segment * (WORDS * 16) + lane
    bits = tl.zeros(segment.shape, tl.uint64)
    if FIXED:
        # Stores come last: loads could not pass them.
        full = ()
        for k in tl.static_range(ROWS):
            unit = _unit(
                k,
                x,
                segment,
                left,
                lane,
                bucket,
                within,
                of_first,
                of_next,
                bucket_size,
                buckets,
                magic,
                stream,
                state,
                BUCKETS,
                FIXED,
                ROWS,
                DIGITS,
                BASE,
                PREPARE,
                CODE,
                RULE,
                OPTIONS,
            )
            bits = bits | (unit.to(tl.uint64) << (k * WIDTH % 32))
            if k * WIDTH % 32 + WIDTH >= 32:
                full = full + (bits,)
                bits = bits >> 32
        for word in tl.static_range(WORDS):
            value = full[word].to(tl.uint32).to(tl.int32, bitcast=True)
            tl.store(target + word * 16, value, mask=word < own_words)
    else:
        for k in range(ROWS):
            unit = _unit(
                k,
                x,
                segment,
                left,
                lane,
                bucket,
                within,
                of_first,
                of_next,
                bucket_size,
                buckets,
                magic,
                stream,
                state,
                BUCKETS,
                FIXED,
                ROWS,
                DIGITS,
                BASE,
                PREPARE,
                CODE,
                RULE,
                OPTIONS,
            )
            word, shift = k * WIDTH // 32, k * WIDTH % 32
            bits = bits | (unit.to(tl.uint64) << shift)
            value = bits.to(tl.uint32).to(tl.int32, bitcast=True)
            ends = shift + WIDTH >= 32
            tl.store(target + word * 16, value, mask=(word < own_words) & ends)
            bits = tl.where(ends, bits >> 32, bits)


@triton.jit
def _unit(
    k,
    x,
    segment,
    left,
    lane,
    bucket,
    within,
    of_first,
    of_next,
    bucket_size,
    buckets,
    magic,
    stream,
    state,
    BUCKETS: tl.constexpr,
    FIXED: tl.constexpr,
    ROWS: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    PREPARE: tl.constexpr,
    CODE: tl.constexpr,
    RULE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Build the unit of row k from its last digit to its first; missing coordinates are 0."""
    unit = tl.zeros(segment.shape, tl.uint32)
    for digit in tl.static_range(DIGITS):
        place, i, there = coordinate(
            k, DIGITS - 1 - digit, segment, left, lane, FIXED, ROWS, DIGITS
        )
        v = tl.load(x + i, mask=there, other=0.0)
        if BUCKETS == ALIGNED:
            of_own = of_first
        else:
            over = crossed(place, within, bucket_size, magic, BUCKETS)
            if BUCKETS == LONG:
                of_own = _chosen(over > 0, of_next, of_first)
            else:
                of_own = _about(
                    bucket + over,
                    within - over * bucket_size,
                    buckets,
                    stream,
                    state,
                    PREPARE,
                    OPTIONS,
                )
        counter = place.to(tl.uint32) * COUNTER + of_own[0]
        code = CODE(v, counter, of_own[1], of_own[2], state, i, there, RULE, OPTIONS)
        unit = unit * BASE + tl.where(there, code, 0)
    return unit


@triton.jit
def _chosen(condition, a, b):
    """Choose between the results of ``_about`` for two buckets."""
    PARTS: tl.constexpr = len(a[2])
    about = ()
    for part in tl.static_range(PARTS):
        about = about + (tl.where(condition, a[2][part], b[2][part]),)
    return tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1]), about
