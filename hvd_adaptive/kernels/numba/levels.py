"""Compute levels of each bucket from its own coordinates (ORQ paper) in Numba."""

from __future__ import annotations

import numpy as np
import torch

from hvd_adaptive.base.device import HOST
from hvd_adaptive.kernels.constants import (
    MOST_PASSES,
    NEGLIGIBLE,
    NORM_LANES,
    START_HIGH,
    START_LOW,
    TOLERANCE,
)
from hvd_adaptive.kernels.numba import sort
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.scan import clip_to, lane_sum, norm_of

_ZERO = np.float64(0)


def orq_levels(
    flat: torch.Tensor, bucket_size: int, levels: int, clip: float | None, sweeps: int
) -> torch.Tensor:
    out = _room(flat, bucket_size, levels)
    _orq(flat.numpy(), bucket_size, clip or 0.0, sweeps, out.numpy())
    return out


def quantile_levels(
    flat: torch.Tensor, bucket_size: int, levels: int, clip: float | None
) -> torch.Tensor:
    out = _room(flat, bucket_size, levels)
    _quantiles(flat.numpy(), bucket_size, clip or 0.0, out.numpy())
    return out


def mean_magnitudes(flat: torch.Tensor, bucket_size: int, clip: float | None) -> torch.Tensor:
    out = _room(flat, bucket_size, 1)
    _mean_magnitudes(flat.numpy(), bucket_size, clip or 0.0, out.numpy())
    return out


def symmetric_levels(flat: torch.Tensor, bucket_size: int, clip: float | None) -> torch.Tensor:
    out = _room(flat, bucket_size, 1)
    _symmetric(flat.numpy(), bucket_size, clip or 0.0, out.numpy())
    return out


def conditional_means(
    flat: torch.Tensor, bucket_size: int, clip: float | None, iterate: bool
) -> torch.Tensor:
    out = _room(flat, bucket_size, 3)
    passes = MOST_PASSES if iterate else 1
    _conditional_means(flat.numpy(), bucket_size, clip or 0.0, passes, out.numpy())
    return out


def warm() -> None:
    """Compile every kernel here into Numba's cache."""
    flat = torch.linspace(-1, 1, 300, **HOST)
    orq_levels(flat, 300, 3, None, 1)
    quantile_levels(flat, 300, 3, None)
    mean_magnitudes(flat, 300, None)
    symmetric_levels(flat, 300, None)
    conditional_means(flat, 300, None, True)


def _room(flat: torch.Tensor, bucket_size: int, columns: int) -> torch.Tensor:
    return torch.empty(-(-flat.numel() // bucket_size), columns, **HOST)


@inline
def _bucket(x, b, bucket_size, clip, acc, cell, buffer):
    """Return bucket b, clipped if ``clip`` > 0, and its largest magnitude (0 or NaN: no levels)."""
    bucket = x[b * bucket_size : min(x.size, (b + 1) * bucket_size)]
    if clip > 0:
        clip_to(bucket, clip, acc, buffer[: bucket.size])
        bucket = buffer[: bucket.size]
    return bucket, norm_of(bucket, True, acc, cell)


@inline
def _scratch(bucket_size, clip):
    acc, cell = np.empty(NORM_LANES, np.float32), np.empty(1, np.float32)
    return acc, cell, np.empty(bucket_size if clip > 0 else 0, np.float32)


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


@jit
def _orq(x, bucket_size, clip, sweeps, levels):
    acc, cell, buffer = _scratch(bucket_size, clip)
    lanes = np.empty(NORM_LANES, np.float64)
    last = levels.shape[1] - 1
    places = np.empty(last + 1, np.int64)
    room, counts = np.empty(bucket_size, np.float32), _counters()
    keys, spare = np.empty(bucket_size, np.uint32), np.empty(bucket_size, np.uint32)
    for b in range(levels.shape[0]):
        bucket, norm = _bucket(x, b, bucket_size, clip, acc, cell, buffer)
        if not norm > 0:
            levels[b] = norm
            continue
        n = bucket.size
        ordered = room[:n]
        sort.sort_floats(bucket, ordered, keys[:n], spare[:n], counts)
        places[0], places[last] = 0, n - 1
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
            levels[b, k] = ordered[places[k]]


@inline
def _counters():
    return np.empty((sort.PASSES, sort.BINS), np.int64)


@jit
def _quantiles(x, bucket_size, clip, levels):
    acc, cell, buffer = _scratch(bucket_size, clip)
    last = levels.shape[1] - 1
    room, counts = np.empty(bucket_size, np.float32), _counters()
    keys, spare = np.empty(bucket_size, np.uint32), np.empty(bucket_size, np.uint32)
    for b in range(levels.shape[0]):
        bucket, norm = _bucket(x, b, bucket_size, clip, acc, cell, buffer)
        if not norm > 0:
            levels[b] = norm
            continue
        n = bucket.size
        ordered = room[:n]
        sort.sort_floats(bucket, ordered, keys[:n], spare[:n], counts)
        for k in range(last + 1):
            place, rest = k * (n - 1) // last, k * (n - 1) % last
            below = np.float64(ordered[place])
            above = np.float64(ordered[min(place + 1, n - 1)])
            levels[b, k] = np.float32(below + (above - below) * (np.float64(rest) / last))


@jit
def _mean_magnitudes(x, bucket_size, clip, scales):
    acc, cell, buffer = _scratch(bucket_size, clip)
    lanes = np.empty(NORM_LANES, np.float64)
    for b in range(scales.shape[0]):
        bucket, norm = _bucket(x, b, bucket_size, clip, acc, cell, buffer)
        if norm > 0:
            total = lane_sum(bucket, _magnitude_above, np.float32(-1), lanes)
            norm = np.float32(total / bucket.size)
        scales[b, 0] = norm


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


@jit
def _symmetric(x, bucket_size, clip, scales):
    acc, cell, buffer = _scratch(bucket_size, clip)
    lanes = np.empty(NORM_LANES, np.float64)
    for b in range(scales.shape[0]):
        bucket, norm = _bucket(x, b, bucket_size, clip, acc, cell, buffer)
        scales[b, 0] = _symmetric_level(bucket, lanes) if norm > 0 else norm


@jit
def _conditional_means(x, bucket_size, clip, passes, out):
    acc, cell, buffer = _scratch(bucket_size, clip)
    lanes = np.empty(NORM_LANES, np.float64)
    for b in range(out.shape[0]):
        bucket, norm = _bucket(x, b, bucket_size, clip, acc, cell, buffer)
        if not norm > 0:
            out[b] = norm
            continue
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
        out[b, 0], out[b, 1], out[b, 2] = low, high, cut
