"""Rotate, quantise and pack (EDEN) in Triton, and invert it.

A rotation is a launch for all buckets (rotation.py); norms and products are summed in the lanes of
the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.eden import Buckets, Levels, finished_scales, shared_streams, weight_of
from hvd_adaptive.kernels.packing import check_sections, packing_of
from hvd_adaptive.kernels.triton.codes import pack, unpack
from hvd_adaptive.kernels.triton.lanes import bucket_sizes, fold, lane_tree
from hvd_adaptive.kernels.triton.launch import WARPS, kernel, launch, on_device
from hvd_adaptive.kernels.triton.layout import for_each, place_of
from hvd_adaptive.kernels.triton.rotation import rotate
from hvd_adaptive.kernels.triton.tables import bucket_norms


def encode(flat, scales, words, bucket_size, levels, shared, own):
    buckets = Buckets(flat.numel(), bucket_size)
    streams = [*shared_streams(shared, levels.bits), own]
    largest = bucket_norms(flat, bucket_size, "linf")
    y = flat.new_empty(buckets.codes)
    for_each(_load_kernel, y, bucket_size, flat, largest, y, flat.numel())
    for rows, numbers in _rows(y, torch.arange(buckets.count, device=flat.device), bucket_size):
        for stream in streams:
            rotate(rows, numbers, stream)
    norms = bucket_norms(y, bucket_size, "l2")
    found = torch.empty(
        levels.codes(buckets.codes, bucket_size), dtype=torch.uint8, device=flat.device
    )
    thresholds, values = _tables(levels, flat.device)
    deviations = _times(norms, y, bucket_size, lambda length: length**-0.5)
    kept = levels.kept(bucket_size), levels.kept(buckets.last)
    tables = deviations, thresholds, values
    for_each(_round_kernel, y, bucket_size, *kept, *tables, y, found, BITS=levels.bits)
    products = torch.empty_like(norms)
    sizes = y.numel(), bucket_size, buckets.count
    launch(_sums_kernel, -(-buckets.count // WARPS), y, y, products, *sizes, BUCKETS=WARPS)
    ones = torch.ones_like(norms)
    weights = _times(ones, y, bucket_size, lambda length: weight_of(length, len(streams)))
    scales.copy_(finished_scales(largest, norms, products, weights))
    for rows, of_rows in _rows(found, scales, kept[0]):
        rows.masked_fill_(~(of_rows > 0).unsqueeze(1), 0)
    pack(found, packing_of(1 << levels.bits), words)


def decode_add(payloads, bucket_size, levels, shared, owns, out):
    buckets, packing = Buckets(out.numel(), bucket_size), packing_of(1 << levels.bits)
    codes = levels.codes(buckets.codes, bucket_size)
    check_sections(payloads, "buckets", buckets.count, packing.words(codes))
    numbers = torch.arange(buckets.count, device=out.device)
    sums = out.new_zeros(buckets.codes)
    used = torch.zeros(buckets.count, dtype=torch.bool, device=out.device)
    found = torch.empty(codes, dtype=torch.uint8, device=out.device)
    kept = levels.kept(bucket_size), levels.kept(buckets.last)
    values, y = _tables(levels, out.device)[1], torch.empty_like(sums)
    for (scales, words), own in zip(payloads, owns, strict=True):
        scales = scales[: buckets.count]
        unpack(words, packing, found)
        weights = _times(scales, y, bucket_size, weight_of)
        for_each(_take_kernel, y, bucket_size, *kept, found, weights, values, y)
        for rows, own_numbers in _rows(y, numbers, bucket_size):
            rotate(rows, own_numbers, own, back=True)
        for_each(_add_kernel, y, bucket_size, y, scales, sums)
        used |= scales != 0
    for rows, own_numbers in _rows(sums, numbers, bucket_size):
        for stream in reversed(shared_streams(shared, levels.bits)):
            rotate(rows, own_numbers, stream, True, weight_of(rows.shape[1]))
    for_each(_add_kernel, out, bucket_size, sums, used, out)


def _rows(
    y: torch.Tensor, of_buckets: torch.Tensor, bucket_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield whole buckets of y as rows, then the partial one, each with its own of_buckets."""
    whole = y.numel() // bucket_size
    if whole:
        yield y[: whole * bucket_size].view(whole, bucket_size), of_buckets[:whole]
    if y.numel() % bucket_size:
        yield y[whole * bucket_size :].view(1, -1), of_buckets[whole:]


def _times(
    of_buckets: torch.Tensor, y: torch.Tensor, bucket_size: int, factor: Callable[[int], float]
) -> torch.Tensor:
    """Return of_buckets times a factor of the buckets' lengths."""
    found = of_buckets.clone()
    for rows, own in _rows(y, found, bucket_size):
        own *= factor(rows.shape[1])
    return found


@functools.lru_cache(maxsize=32)
def _tables(levels: Levels, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positive thresholds, or one that is not read, and the levels."""
    half = len(levels.values) // 2
    thresholds = levels.thresholds[half:] if half > 1 else levels.values
    return on_device(thresholds, device), on_device(levels.values, device)


@triton.jit
def _code_at(i, row, n, bucket_size, kept, kept_last):
    """Return the places of the codes of rotated coordinates, and which have any."""
    place = i - row * bucket_size
    own = tl.where(row == n // bucket_size, kept_last, kept)
    return row * kept + place, place < own


@kernel
def _load_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    x,
    largest,
    y,
    coordinates: tl.int64,
    TILE: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Set y to buckets times the power of two that brings the largest coordinate into [2, 4)."""
    i, there, row = place_of(n, bucket_size, TILE, INSIDE)
    bound = tl.load(largest + row, mask=there, other=0.0)
    exponent = tl.minimum(tl.maximum(bound.to(tl.int32, bitcast=True) >> 23, 1), 254)
    factor = ((255 - exponent) << 23).to(tl.float32, bitcast=True)
    v = tl.load(x + i, mask=there & (i < coordinates), other=0.0)
    tl.store(y + i, tl.where(bound > 0, v * factor, 0.0), mask=there)


@kernel
def _round_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    kept: tl.int64,
    kept_last: tl.int64,
    deviations,
    thresholds,
    values,
    y,
    codes,
    TILE: tl.constexpr,
    INSIDE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Store codes, and replace y by its size times the level's, or 0 if it has no code."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    i, there, row = place_of(n, bucket_size, TILE, INSIDE)
    v = tl.load(y + i, mask=there, other=0.0)
    deviation = tl.load(deviations + row, mask=there, other=0.0)
    size = tl.abs(v)
    m = tl.zeros((TILE,), tl.int32)
    for k in tl.static_range(BITS - 1):
        step = HALF >> (k + 1)
        m = tl.where(size >= tl.load(thresholds + m + (step - 1)) * deviation, m + step, m)
    at, coded = _code_at(i, row, n, bucket_size, kept, kept_last)
    code = tl.where(v < 0, HALF - 1 - m, HALF + m)
    tl.store(codes + at, code.to(tl.uint8), mask=there & coded)
    tl.store(y + i, tl.where(coded, size * tl.load(values + HALF + m), 0.0), mask=there)


@triton.jit
def _term(v, state, total):
    return total + v


@kernel
def _sums_kernel(
    y, sums, n: tl.int64, bucket_size: tl.int64, buckets: tl.int64, BUCKETS: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64) * BUCKETS + tl.arange(0, BUCKETS)[:, None]
    size = bucket_sizes(b, n, bucket_size)
    zeros = tl.zeros((BUCKETS, 32), tl.float32)
    lanes = fold(y, b * bucket_size, size, tl.max(size), _term, 0, zeros)
    total = tl.reshape(lane_tree(lanes, BUCKETS), (BUCKETS, 1))
    tl.store(sums + b, total, mask=b < buckets)


@kernel
def _take_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    kept: tl.int64,
    kept_last: tl.int64,
    codes,
    weights,
    values,
    y,
    TILE: tl.constexpr,
    INSIDE: tl.constexpr,
):
    i, there, row = place_of(n, bucket_size, TILE, INSIDE)
    at, coded = _code_at(i, row, n, bucket_size, kept, kept_last)
    level = tl.load(values + tl.load(codes + at, mask=there & coded, other=0).to(tl.int32))
    value = level * tl.load(weights + row, mask=there, other=0.0)
    tl.store(y + i, tl.where(coded, value, 0.0), mask=there)


@kernel
def _add_kernel(
    n: tl.int64, bucket_size: tl.int64, y, used, sums, TILE: tl.constexpr, INSIDE: tl.constexpr
):
    """Add buckets of y to sums where ``used`` is not 0."""
    i, there, row = place_of(n, bucket_size, TILE, INSIDE)
    there = there & (tl.load(used + row, mask=there, other=0) != 0)
    before = tl.load(sums + i, mask=there, other=0.0)
    tl.store(sums + i, before + tl.load(y + i, mask=there, other=0.0), mask=there)
