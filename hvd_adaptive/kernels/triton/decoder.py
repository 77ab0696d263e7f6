"""Unpack, look up, scale and add over all ranks' payloads in Triton.

A scheme is a constant of the kernel: ``VALUE(code, bucket, there, payload, state, OPTIONS)``
returns the decoded values, float32, of codes (int32) in buckets (int64). there: which coordinates
exist. payload: pointer to the first of the rank's two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import Packing
from hvd_adaptive.kernels.triton.launch import kernel, launch, regular_runs
from hvd_adaptive.kernels.triton.layout import (
    Tensor,
    bucket_under,
    coordinate,
    coordinates_left,
    crossed,
    layout_of,
    magic,
    words_left,
)


class Run(NamedTuple):
    """Hold the first of ``count`` payloads at equal distances, and what decodes them."""

    payload: Any
    words: Any
    lane_words: Any
    count: Any
    step: Any
    words_step: Any
    factor: Any
    value: Any
    state: Any
    options: Any


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
    layout, n = layout_of(packing, bucket_size), out.numel()
    place = out, n, bucket_size, magic(bucket_size), packing.words(n) // 16
    programs = -(-n // (layout.tile * layout.coordinates))
    for first, count, steps in regular_runs(payloads):
        scheme["ADD"] = add or first > 0
        at_end = factor if first + count == len(payloads) else 1.0
        args = *payloads[first], *place, count, *steps, at_end, state
        constants = {"LAYOUT": layout, "OPTIONS": OPTIONS, **scheme}
        launch(_decode_kernel, programs, out, *args, **constants)


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
    ADD: tl.constexpr,
    LAYOUT: tl.constexpr,
    VALUE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Decode a tile of segments in each program. The first payload's sections begin at ``payload``
    and ``words``, those of the next ones ``step`` and ``words_step`` numbers behind.
    """
    # Assigning a tuple would turn its constants into tensors.
    _decode_segments(
        Tensor(out, n, bucket_size, magic),
        Run(payload, words, lane_words, count, step, words_step, factor, VALUE, state, OPTIONS),
        ADD,
        LAYOUT,
    )


@triton.jit
def _decode_segments(tensor, run, ADD: tl.constexpr, LAYOUT: tl.constexpr):
    ROWS: tl.constexpr = LAYOUT.rows
    thread = tl.arange(0, 16 * LAYOUT.tile)
    segment = tl.program_id(0).to(tl.int64) * LAYOUT.tile + thread // 16
    bucket, within = bucket_under(segment, tensor.bucket_size, LAYOUT.coordinates)
    tile = (segment, thread % 16, bucket, within)
    if LAYOUT.fixed:
        for k in tl.static_range(ROWS):
            _decode_row(k, tensor, tile, run, ADD, LAYOUT)
    else:
        for k in range(ROWS):
            _decode_row(k, tensor, tile, run, ADD, LAYOUT)


@triton.jit
def _decode_row(k, tensor, tile, run, ADD: tl.constexpr, LAYOUT: tl.constexpr):
    """Add row k of all payloads into the tensor. tile: segments, lanes, ``bucket_under``."""
    DIGITS: tl.constexpr = LAYOUT.digits
    WORDS: tl.constexpr = LAYOUT.rows * LAYOUT.width // 32
    segment, lane, bucket, within = tile
    left = coordinates_left(segment, tensor.n, LAYOUT.coordinates)
    own_words = words_left(segment, run.lane_words, WORDS)
    totals = ()
    for digit in tl.static_range(DIGITS):
        place, i, there = coordinate(k, digit, segment, left, lane, LAYOUT)
        if ADD:
            totals = totals + (tl.load(tensor.x + i, mask=there, other=0.0),)
        else:
            totals = totals + (tl.zeros(segment.shape, tl.float32),)
    source, payload = run.words + segment * (WORDS * 16) + lane, run.payload
    for _ in range(run.count):
        rest = _unit_of(k, source, own_words, LAYOUT.fixed, LAYOUT.width)
        sums = ()
        for digit in tl.static_range(DIGITS):
            place, i, there = coordinate(k, digit, segment, left, lane, LAYOUT)
            of = bucket + crossed(place, within, tensor.bucket_size, tensor.magic, LAYOUT.buckets)
            code = (rest % LAYOUT.base).to(tl.int32)
            rest = rest // LAYOUT.base
            value = run.value(code, of, there, payload, run.state, run.options)
            sums = sums + (totals[digit] + value,)
        totals = sums
        source += run.words_step
        payload += run.step
    for digit in tl.static_range(DIGITS):
        place, i, there = coordinate(k, digit, segment, left, lane, LAYOUT)
        tl.store(tensor.x + i, totals[digit] * run.factor, mask=there)


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
