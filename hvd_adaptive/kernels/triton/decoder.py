"""Unpack, look up, scale and add over all ranks' payloads in Triton.

A scheme is a constant of the kernel: ``VALUE(code, bucket, i, there, payload, state, OPTIONS)``
returns the decoded values, float32, of codes (int32) in buckets (int64). i: the coordinates' places
in the tensor (int64); there: which of them exist. payload: pointer to the first of the rank's two
tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import Packing
from hvd_adaptive.kernels.tables import KernelTable
from hvd_adaptive.kernels.triton.launch import WARPS, kernel, launch, on_device, regular_runs
from hvd_adaptive.kernels.triton.layout import (
    bucket_under,
    coordinate,
    coordinates_left,
    crossed,
    magic,
    segments_of,
    words_left,
)


def decode_add(
    payloads: list[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    table: KernelTable,
    factor: float,
    out: torch.Tensor,
    add: bool = True,
) -> None:
    """See reference.tables.decode_add."""
    for scales, words in payloads:
        if scales.numel() * bucket_size < out.numel() or words.numel() < table.packing.words(
            out.numel()
        ):
            raise ValueError(
                f"payload of {scales.numel()} scales and {words.numel()} words is too short"
            )
    state = (_values(table, out.device),)
    unpack_add(payloads, bucket_size, table.packing, factor, out, add, state, VALUE=_scaled_level)


def unpack_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    packing: Packing,
    factor: float,
    out: torch.Tensor,
    add: bool,
    state: tuple,
    OPTIONS: tuple = (),
    **scheme: Any,
) -> None:
    """Set out (float32, (n,)) to factor * (out + the payloads' values, added in order).

    A payload is two tensors, the second its words (int32); the caller guarantees that both are long
    enough. add: if False, ``out`` counts as zeros. scheme: VALUE; ``state``, which must not be
    empty, and ``OPTIONS`` are its arguments.
    """
    if not payloads:
        (out if add else out.zero_()).mul_(factor)
        return
    segments, n = segments_of(packing), out.numel()
    tile = 2 * WARPS
    for first, count, (step, words_step) in regular_runs(payloads):
        last = first + count == len(payloads)
        launch(
            _decode_kernel,
            -(-n // (tile * segments.coordinates)),
            out,
            *payloads[first],
            out,
            n,
            bucket_size,
            magic(bucket_size),
            packing.words(n) // 16,
            count,
            step,
            words_step,
            factor if last else 1.0,
            state,
            SEGMENTS=tile,
            ADD=add or first > 0,
            BUCKETS=segments.buckets(bucket_size),
            OPTIONS=OPTIONS,
            **segments.constants,
            **scheme,
        )


@triton.jit
def _scaled_level(code, bucket, i, there, scales, state, OPTIONS: tl.constexpr):
    """Multiply a shared table's value by the bucket's scale."""
    scale = tl.load(scales + bucket, mask=there, other=0.0)
    return tl.load(state[0] + code) * scale


@functools.lru_cache(maxsize=64)
def _values(table: KernelTable, device: torch.device) -> torch.Tensor:
    return on_device(table.values, device)


@kernel
def _decode_kernel(
    payload,
    words,
    out,
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    lane_words: tl.int64,
    count: tl.int32,
    step: tl.int64,
    words_step: tl.int64,
    factor,
    state,
    SEGMENTS: tl.constexpr,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    FIXED: tl.constexpr,
    ROWS: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Decode a tile of segments in each program. The first payload's sections begin at ``payload``
    and ``words``, those of the next ones ``step`` and ``words_step`` numbers behind.
    """
    thread = tl.arange(0, 16 * SEGMENTS)
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + thread // 16
    bucket, within = bucket_under(segment, bucket_size, 16 * ROWS * DIGITS)
    if FIXED:
        for k in tl.static_range(ROWS):
            _decode_row(
                k,
                payload,
                words,
                out,
                segment,
                thread % 16,
                n,
                bucket,
                within,
                bucket_size,
                magic,
                lane_words,
                count,
                step,
                words_step,
                factor,
                state,
                ADD,
                BUCKETS,
                FIXED,
                ROWS,
                DIGITS,
                BASE,
                WIDTH,
                VALUE,
                OPTIONS,
            )
    else:
        for k in range(ROWS):
            _decode_row(
                k,
                payload,
                words,
                out,
                segment,
                thread % 16,
                n,
                bucket,
                within,
                bucket_size,
                magic,
                lane_words,
                count,
                step,
                words_step,
                factor,
                state,
                ADD,
                BUCKETS,
                FIXED,
                ROWS,
                DIGITS,
                BASE,
                WIDTH,
                VALUE,
                OPTIONS,
            )


@triton.jit
def _decode_row(
    k,
    payload,
    words,
    out,
    segment,
    lane,
    n,
    bucket,
    within,
    bucket_size,
    magic,
    lane_words,
    count,
    step,
    words_step,
    factor,
    state,
    ADD: tl.constexpr,
    BUCKETS: tl.constexpr,
    FIXED: tl.constexpr,
    ROWS: tl.constexpr,
    DIGITS: tl.constexpr,
    BASE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Add row k of all payloads into ``out``."""
    left = coordinates_left(segment, n, 16 * ROWS * DIGITS)
    own_words = words_left(segment, lane_words, ROWS * WIDTH // 32)
    totals = ()
    for digit in tl.static_range(DIGITS):
        place, i, there = coordinate(k, digit, segment, left, lane, FIXED, ROWS, DIGITS)
        if ADD:
            totals = totals + (tl.load(out + i, mask=there, other=0.0),)
        else:
            totals = totals + (tl.zeros(segment.shape, tl.float32),)
    source = words + segment * (ROWS * WIDTH // 2) + lane
    for _ in range(count):
        rest = _unit_of(k, source, own_words, FIXED, WIDTH)
        sums = ()
        for digit in tl.static_range(DIGITS):
            place, i, there = coordinate(k, digit, segment, left, lane, FIXED, ROWS, DIGITS)
            of = bucket + crossed(place, within, bucket_size, magic, BUCKETS)
            code = (rest % BASE).to(tl.int32)
            rest = rest // BASE
            value = VALUE(code, of, i, there, payload, state, OPTIONS)
            sums = sums + (totals[digit] + value,)
        totals = sums
        source += words_step
        payload += step
    for digit in tl.static_range(DIGITS):
        place, i, there = coordinate(k, digit, segment, left, lane, FIXED, ROWS, DIGITS)
        tl.store(out + i, totals[digit] * factor, mask=there)


@triton.jit
def _unit_of(k, source, own_words, FIXED: tl.constexpr, WIDTH: tl.constexpr):
    """Return the unit (uint32) of row k; its lane's words begin at ``source``, 16 apart."""
    word, shift = k * WIDTH // 32, k * WIDTH % 32
    low = tl.load(source + word * 16, mask=word < own_words, other=0)
    unit = low.to(tl.uint32, bitcast=True) >> shift
    if FIXED:
        STRADDLES: tl.constexpr = k * WIDTH % 32 + WIDTH > 32
        if STRADDLES:
            high = tl.load(source + word * 16 + 16, mask=word + 1 < own_words, other=0)
            unit = unit | (high.to(tl.uint32, bitcast=True) << (32 - shift))
    else:
        straddles = shift + WIDTH > 32
        high = tl.load(source + word * 16 + 16, mask=(word + 1 < own_words) & straddles, other=0)
        wide = high.to(tl.uint32, bitcast=True).to(tl.uint64) << (32 - shift)
        unit = unit | wide.to(tl.uint32)
    return unit & (0xFFFFFFFF >> (32 - WIDTH))
