"""Compute bucket norms and histograms in Numba: loops that only read."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.constants import BINS, COARSE_BINS, NORM_LANES
from hvd_adaptive.kernels.numba.jit import inline, jit

_UP, _DOWN = np.float32(2.0**96), np.float32(2.0**-96)
_SMALL, _LARGE = np.float32(2.0**-80), np.float32(2.0**120)
_SMALLEST_NORM = np.float32(2.0**-126)
_NAN = np.float32(np.nan)
_ONE = np.float32(1)
_FINE_FROM = np.float32(2.0**-12)


@inline
def add_lanes(acc):
    half = NORM_LANES // 2
    while half:
        for lane in range(half):
            acc[lane] += acc[lane + half]
        half //= 2
    return acc[0]


@inline
def lane_sum(x, term, at, lanes):
    """Sum term(v, at) over x: lane l adds those of x[l], x[l + 32], ... in order, then a tree adds
    the lanes.
    """
    lanes[:] = 0
    quads = x.size // (4 * NORM_LANES)
    for quad in range(quads):
        part = x[quad * 4 * NORM_LANES : (quad + 1) * 4 * NORM_LANES]
        for lane in range(NORM_LANES):
            a, b = term(part[lane], at), term(part[lane + NORM_LANES], at)
            c, d = term(part[lane + 2 * NORM_LANES], at), term(part[lane + 3 * NORM_LANES], at)
            lanes[lane] = (((lanes[lane] + a) + b) + c) + d
    for i in range(quads * 4 * NORM_LANES, x.size):
        lanes[i % NORM_LANES] += term(x[i], at)
    return add_lanes(lanes)


@inline
def _scaled_square(v, factor):
    y = v * factor
    return y * y


@inline
def largest_bits(x):
    """Return the bits of the largest absolute value; infinite or NaN bit patterns are larger than
    every finite one.
    """
    bits = x.view(np.uint32)
    largest = np.uint32(0)
    for i in range(x.size):
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    return largest


@inline
def norm_of(x, linf, acc):
    """Return a bucket's norm: 0 below the normal range, NaN if not finite."""
    norm = np.uint32(largest_bits(x)).view(np.float32) if linf else _euclidean(x, acc)
    return _normal(norm)


@inline
def _euclidean(x, acc):
    total = lane_sum(x, _scaled_square, _ONE, acc)
    if total < _SMALL:
        return np.sqrt(lane_sum(x, _scaled_square, _UP, acc)) * _DOWN
    if total <= _LARGE:
        return np.sqrt(total)
    return np.sqrt(lane_sum(x, _scaled_square, _DOWN, acc)) * _UP


@inline
def _normal(norm):
    if norm < _SMALLEST_NORM:
        return np.float32(0)
    if not np.isfinite(norm):
        return _NAN
    return norm


@jit
def bucket_norms(x, bucket_size, linf):
    count = (x.size + bucket_size - 1) // bucket_size
    norms, acc = np.empty(count, np.float32), np.empty(NORM_LANES, np.float32)
    for b in range(count):
        norms[b] = norm_of(x[b * bucket_size : min(x.size, (b + 1) * bucket_size)], linf, acc)
    return norms


@inline
def clip_to(x, clip, acc, out):
    """Set out to x within ``clip`` root mean squares, NaN if x has no norm."""
    norm = _normal(_euclidean(x, acc))
    limit = np.float32(norm * np.float32(clip / np.sqrt(np.float64(x.size))))
    if np.isnan(limit):
        out[:] = _NAN
        return
    for i in range(x.size):
        v = x[i]
        v = -limit if v < -limit else v
        out[i] = limit if v > limit else v


@jit
def clipped(x, bucket_size, clip):
    out = np.empty_like(x)
    acc = np.empty(NORM_LANES, np.float32)
    for begin in range(0, x.size, bucket_size):
        end = min(x.size, begin + bucket_size)
        clip_to(x[begin:end], clip, acc, out[begin:end])
    return out


@jit
def histogram(x, scale):
    counts = np.zeros(BINS + 2, np.int64)
    inverse = _ONE / scale
    r = np.abs(x) * inverse
    bits = r.view(np.int32)
    for i in range(x.size):
        if r[i] == 0:
            counts[BINS] += 1
        elif r[i] < _FINE_FROM:
            counts[max((bits[i] >> 20) - ((127 - 28) << 3), 0)] += 1
        elif r[i] < _ONE:
            counts[COARSE_BINS + (bits[i] >> 16) - ((127 - 12) << 7)] += 1
        elif r[i] >= _ONE:  # a NaN is in no bin
            counts[BINS + 1] += 1
    return counts
