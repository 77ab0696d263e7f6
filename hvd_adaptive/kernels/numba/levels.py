"""Compute levels of each bucket from its own coordinates (ORQ paper) in Numba."""

from __future__ import annotations

import functools

import numpy as np
import torch

from hvd_adaptive.base.tensors import HOST
from hvd_adaptive.kernels.constants import NORM_LANES
from hvd_adaptive.kernels.levels import MOST_PASSES, NEGLIGIBLE, START_HIGH, START_LOW, TOLERANCE
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.scan import clip_to, lane_sum, norm_of

DIGIT_BITS = 11
PASSES = 3
BINS = 1 << DIGIT_BITS
# Shorter buckets are sorted by comparisons: clearing the counters would cost more.
LEAST_RADIX = 160

_SIGN, _ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
_MASK, _DIGIT = np.uint32(BINS - 1), np.uint32(DIGIT_BITS)
_ZERO = np.float64(0)

# What a kernel computes.
_ORQ, _QUANTILES, _MEAN_MAGNITUDE, _SYMMETRIC, _CONDITIONAL_MEANS = range(5)


def orq_levels(flat, bucket_size, levels, clip, sweeps):
    return _solved(_ORQ, flat, bucket_size, clip, levels, sweeps)


def quantile_levels(flat, bucket_size, levels, clip):
    return _solved(_QUANTILES, flat, bucket_size, clip, levels)


def mean_magnitudes(flat, bucket_size, clip):
    return _solved(_MEAN_MAGNITUDE, flat, bucket_size, clip, 1)


def symmetric_levels(flat, bucket_size, clip):
    return _solved(_SYMMETRIC, flat, bucket_size, clip, 1)


def conditional_means(flat, bucket_size, clip, iterate):
    passes = MOST_PASSES if iterate else 1
    return _solved(_CONDITIONAL_MEANS, flat, bucket_size, clip, 3, passes)


def _solved(
    rule: int,
    flat: torch.Tensor,
    bucket_size: int,
    clip: float | None,
    columns: int,
    turns: int = 0,
) -> torch.Tensor:
    out = torch.empty(-(-flat.numel() // bucket_size), columns, **HOST)
    _solver(rule)(flat.numpy(), bucket_size, clip or 0.0, turns, out.numpy())
    return out


@functools.cache
def _solver(rule: int):
    """Return the kernel that fills a row for each bucket; ``rule`` is a constant of its code."""

    @jit
    def solve(x, bucket_size, clip, turns, out):
        acc, lanes = np.empty(NORM_LANES, np.float32), np.empty(NORM_LANES, np.float64)
        buffer = np.empty(bucket_size, np.float32)
        room, counts = np.empty(bucket_size, np.float32), np.empty((PASSES, BINS), np.int64)
        keys, spare = np.empty(bucket_size, np.uint32), np.empty(bucket_size, np.uint32)
        places = np.empty(out.shape[1], np.int64)
        for b in range(out.shape[0]):
            bucket, row = x[b * bucket_size : min(x.size, (b + 1) * bucket_size)], out[b]
            if clip > 0:
                clip_to(bucket, clip, acc, buffer[: bucket.size])
                bucket = buffer[: bucket.size]
            norm, n = norm_of(bucket, True, acc), bucket.size
            if not norm > 0:  # 0 or NaN: no levels
                row[:] = norm
            elif rule == _MEAN_MAGNITUDE:
                total = lane_sum(bucket, _magnitude_above, np.float32(-1), lanes)
                row[0] = np.float32(total / n)
            elif rule == _SYMMETRIC:
                row[0] = _symmetric_level(bucket, lanes)
            elif rule == _CONDITIONAL_MEANS:
                row[0], row[1], row[2] = _conditional_means(bucket, turns, lanes)
            else:
                sort_floats(bucket, room[:n], keys[:n], spare[:n], counts)
                if rule == _ORQ:
                    _best_levels(room[:n], turns, places, lanes, row)
                else:
                    _quantiles(room[:n], row)

    return solve


@inline
def _itself(v, at):
    return np.float64(v)


@inline
def _from(v, at):
    return np.float64(v if v >= at else np.float32(0))


@inline
def _below(v, at):
    return np.float64(v if v < at else np.float32(0))


@inline
def _magnitude_above(v, at):
    return np.float64(np.abs(v) if np.abs(v) > at else np.float32(0))


@inline
def _square(v, at):
    return np.float64(v) * np.float64(v)


@inline
def _short_of(v, at):
    return at - np.float64(v)


@inline
def _count_from(x, cut):
    count = np.uint32(0)
    for i in range(x.size):
        count = np.uint32(count + np.uint32(x[i] >= cut))
    return np.int64(count)


@inline
def _split(ordered, low, high, lanes):
    bottom, top = np.float64(ordered[low]), np.float64(ordered[high])
    if not top > bottom:
        return (low + high) // 2
    missing = lane_sum(ordered[low : high + 1], _short_of, top, lanes)
    rank = np.int64(np.ceil(missing / (top - bottom)))
    return min(max(low + rank - 1, low), high)


@inline
def _best_levels(ordered, sweeps, places, lanes, levels):
    last = levels.size - 1
    places[0], places[last] = 0, ordered.size - 1
    step = last // 2
    while step:
        for k in range(step, last, 2 * step):
            places[k] = _split(ordered, places[k - step], places[k + step], lanes)
        step //= 2
    for _ in range(sweeps):
        moved = False
        for k in range(1, last):
            place = _split(ordered, places[k - 1], places[k + 1], lanes)
            moved |= ordered[place] != ordered[places[k]]
            places[k] = place
        if not moved:
            break
    for k in range(last + 1):
        levels[k] = ordered[places[k]]


@inline
def _quantiles(ordered, levels):
    last, n = levels.size - 1, ordered.size
    for k in range(last + 1):
        place, rest = k * (n - 1) // last, k * (n - 1) % last
        below = np.float64(ordered[place])
        above = np.float64(ordered[min(place + 1, n - 1)])
        levels[k] = np.float32(below + (above - below) * (np.float64(rest) / last))


@inline
def _symmetric_level(bucket, lanes):
    total = lane_sum(bucket, _magnitude_above, np.float32(-1), lanes)
    squares = lane_sum(bucket, _square, _ZERO, lanes)
    mean = total / bucket.size
    spread = squares - total * mean
    if spread <= NEGLIGIBLE * squares:
        return np.float32(mean)
    low, high = np.float32(mean / 2), np.float32(mean)
    slope_low, slope_high = START_LOW * total, START_HIGH * total
    kept = 0
    level = high
    for turn in range(MOST_PASSES):
        width = np.float64(high) - np.float64(low)
        part = np.float64(0.5) if turn % 4 == 3 else slope_low / (slope_low - slope_high)
        level = np.float32(np.float64(low) + width * part)
        if level <= low or level >= high:
            level = np.float32(np.float64(low) + width * 0.5)
            if level <= low or level >= high:
                return high
        beyond = lane_sum(bucket, _magnitude_above, level, lanes)
        slope = np.float64(level) * bucket.size - beyond
        if 2 * np.abs(slope) * width <= TOLERANCE * spread:
            return level
        if slope < 0:
            low, slope_low = level, slope
            slope_high *= 0.5 if kept < 0 else 1.0
            kept = -1
        else:
            high, slope_high = level, slope
            slope_low *= 0.5 if kept > 0 else 1.0
            kept = 1
    return level


@inline
def _conditional_means(bucket, passes, lanes):
    n, total = bucket.size, lane_sum(bucket, _itself, _ZERO, lanes)
    mean = np.float32(total / n)
    cut = low = high = mean
    count = n
    for turn in range(passes):
        if turn > 0:
            moved = np.float32((np.float64(low) + np.float64(high)) * 0.5)
            if moved == cut:
                break
            cut = moved
        count = _count_from(bucket, cut)
        low = high = mean
        if 0 < count < n:
            above = lane_sum(bucket, _from, cut, lanes)
            low, high = np.float32((total - above) / (n - count)), np.float32(above / count)
    if 0 < count < n:
        low = np.float32(lane_sum(bucket, _below, cut, lanes) / (n - count))
    return low, high, cut


@inline
def sort_floats(x, ordered, keys, spare, counts):
    """Set ordered to ``x`` (float32, (n,), no NaN) in ascending order; -0 counts as 0.

    ordered: float32 (n,). keys, spare: uint32 (n,). counts: int64 (PASSES, BINS).
    """
    for i in range(x.size):
        ordered[i] = x[i] + np.float32(0)
    if x.size < LEAST_RADIX:
        ordered[:] = np.sort(ordered)
        return
    bits = ordered.view(np.uint32)
    counts[:] = 0
    # Keys have the order of the numbers: negative ones are inverted, the others get the sign bit.
    for i in range(bits.size):
        key = np.uint32(bits[i] ^ (_ALL if bits[i] >= _SIGN else _SIGN))
        keys[i] = key
        counts[0, np.uint64(key & _MASK)] += 1
        counts[1, np.uint64(np.uint32(key >> _DIGIT) & _MASK)] += 1
        counts[2, np.uint64(np.uint32(key >> np.uint32(2 * DIGIT_BITS)))] += 1
    _scatter(keys, spare, counts[0], np.uint32(0))
    _scatter(spare, keys, counts[1], _DIGIT)
    _scatter(keys, spare, counts[2], np.uint32(2 * DIGIT_BITS))
    for i in range(bits.size):
        key = spare[i]
        bits[i] = np.uint32(key ^ (_SIGN if key >= _SIGN else _ALL))


@inline
def _scatter(keys, out, counts, shift):
    """Sort stably by the digit at ``shift``; the digits' counts become the ends of their places."""
    place = 0
    for k in range(BINS):
        count = counts[k]
        counts[k] = place
        place += count
    for i in range(keys.size):
        key = keys[i]
        k = np.uint64(np.uint32(key >> shift) & _MASK)
        out[np.uint64(counts[k])] = key
        counts[k] += 1
