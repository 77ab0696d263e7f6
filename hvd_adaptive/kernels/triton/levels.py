"""Compute a bucket's levels from its coordinates (ORQ paper) in Triton, a warp for each bucket;
torch sorts the buckets.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels import levels as spec
from hvd_adaptive.kernels.levels import MOST_PASSES
from hvd_adaptive.kernels.triton.lanes import fold, lane_tree, norm_of
from hvd_adaptive.kernels.triton.launch import kernel, launch
from hvd_adaptive.kernels.triton.tables import bucket_norms, clipped

_MOST_PASSES, _NEGLIGIBLE = tl.constexpr(MOST_PASSES), tl.constexpr(spec.NEGLIGIBLE)
_START_LOW, _START_HIGH = tl.constexpr(spec.START_LOW), tl.constexpr(spec.START_HIGH)
_TOLERANCE = tl.constexpr(spec.TOLERANCE)


def orq_levels(flat, bucket_size, levels, clip, sweeps):
    flat = flat if clip is None else clipped(flat, bucket_size, clip)
    ordered = spec.sorted_rows(flat, bucket_size)
    norms = bucket_norms(flat, bucket_size, "linf")
    out = flat.new_empty(norms.numel(), levels)
    args, room = (flat.numel(), bucket_size, levels, sweeps), triton.next_power_of_2(levels)
    constants = {"ROOM": max(32, room), "num_warps": 1}
    launch(_orq_kernel, norms.numel(), flat, ordered, norms, out, *args, **constants)
    return out


def quantile_levels(flat, bucket_size, levels, clip):
    flat = flat if clip is None else clipped(flat, bucket_size, clip)
    return spec.quantiles(flat, bucket_norms(flat, bucket_size, "linf"), bucket_size, levels)


def mean_magnitudes(flat, bucket_size, clip):
    return _solved(_mean_kernel, flat, bucket_size, clip, 1)


def symmetric_levels(flat, bucket_size, clip):
    return _solved(_symmetric_kernel, flat, bucket_size, clip, 1)


def conditional_means(flat, bucket_size, clip, iterate):
    passes = MOST_PASSES if iterate else 1
    return _solved(_conditional_kernel, flat, bucket_size, clip, 3, PASSES=passes)


def _solved(
    solver: Any, flat: torch.Tensor, bucket_size: int, clip: float | None, columns: int, **more: int
) -> torch.Tensor:
    """Return a row for each bucket."""
    flat = flat if clip is None else clipped(flat, bucket_size, clip)
    out = flat.new_empty(-(-flat.numel() // bucket_size), columns)
    launch(solver, out.shape[0], flat, flat, out, flat.numel(), bucket_size, num_warps=1, **more)
    return out


@triton.jit
def _own_bucket(n, bucket_size):
    """Return number, first coordinate and size of the program's bucket: int64."""
    bucket = tl.program_id(0).to(tl.int64)
    begin = bucket * bucket_size
    return bucket, begin, tl.minimum(n - begin, bucket_size)


@triton.jit
def _lane_sum(x, begin, size, term: tl.constexpr, state, other=0.0):
    """See reference.levels.lane_sum; ``term`` returns a coordinate's summand (float64)."""
    zero = tl.zeros((1, 1), tl.int64)
    lanes = tl.zeros((1, 32), tl.float64)
    lanes = fold(x, begin + zero, size + zero, size, term, state, lanes, other)
    return tl.sum(lane_tree(lanes, 1))


@triton.jit
def _itself(v, state, total):
    return total + v.to(tl.float64)


@triton.jit
def _magnitude_above(v, level, total):
    wide = tl.abs(v).to(tl.float64)
    return total + tl.where(wide > level, wide, 0.0)


@triton.jit
def _square(v, state, total):
    wide = v.to(tl.float64)
    return total + wide * wide


@triton.jit
def _from(v, cut, total):
    wide = v.to(tl.float64)
    return total + tl.where(wide >= cut, wide, 0.0)


@triton.jit
def _below(v, cut, total):
    wide = v.to(tl.float64)
    return total + tl.where(wide >= cut, 0.0, wide)


@triton.jit
def _one_from(v, cut, total):
    """Count; missing coordinates are NaN."""
    return total + tl.where(v.to(tl.float64) >= cut, 1.0, 0.0)


@triton.jit
def _short_of(v, top, total):
    return total + (top - v.to(tl.float64))


@triton.jit
def _narrow(value):
    """Round a float64 to float32."""
    return value.to(tl.float32).to(tl.float64)


@kernel
def _mean_kernel(x, out, n: tl.int64, bucket_size: tl.int64):
    bucket, begin, size = _own_bucket(n, bucket_size)
    norm = norm_of(x, begin, size, 0.0, True, False)
    mean = _lane_sum(x, begin, size, _magnitude_above, -1.0) / size.to(tl.float64)
    tl.store(out + bucket, tl.where(norm > 0, mean.to(tl.float32), norm))


@kernel
def _symmetric_kernel(x, out, n: tl.int64, bucket_size: tl.int64):
    bucket, begin, size = _own_bucket(n, bucket_size)
    norm = norm_of(x, begin, size, 0.0, True, False)
    wide = size.to(tl.float64)
    total = _lane_sum(x, begin, size, _magnitude_above, -1.0)
    squares = _lane_sum(x, begin, size, _square, 0)
    mean = total / wide
    spread = squares - total * mean
    low, high, level = _narrow(mean / 2), _narrow(mean), _narrow(mean)
    slope_low, slope_high = total * _START_LOW, total * _START_HIGH
    kept, turn = 0, 0
    searching = (norm > 0) & (spread > squares * _NEGLIGIBLE)
    while searching & (turn < _MOST_PASSES):
        width = high - low
        part = tl.where(turn % 4 == 3, 0.5, slope_low / (slope_low - slope_high))
        level = _narrow(low + width * part)
        level = tl.where((level <= low) | (level >= high), _narrow(low + width * 0.5), level)
        ended = (level <= low) | (level >= high)
        level = tl.where(ended, high, level)
        slope = level * wide - _lane_sum(x, begin, size, _magnitude_above, level)
        searching = (tl.abs(slope) * 2 * width > spread * _TOLERANCE) & (ended == 0)
        falling = slope < 0
        halved_high = tl.where(kept < 0, slope_high * 0.5, slope_high)
        halved_low = tl.where(kept > 0, slope_low * 0.5, slope_low)
        slope_low, slope_high = (
            tl.where(falling, slope, halved_low),
            tl.where(falling, halved_high, slope),
        )
        low, high = tl.where(falling, level, low), tl.where(falling, high, level)
        kept = tl.where(falling, -1, 1)
        turn += 1
    tl.store(out + bucket, tl.where(norm > 0, level.to(tl.float32), norm))


@kernel
def _conditional_kernel(x, out, n: tl.int64, bucket_size: tl.int64, PASSES: tl.constexpr):
    bucket, begin, size = _own_bucket(n, bucket_size)
    norm = norm_of(x, begin, size, 0.0, True, False)
    wide = size.to(tl.float64)
    total = _lane_sum(x, begin, size, _itself, 0)
    mean = _narrow(total / wide)
    cut, low, high, above, turn = mean, mean, mean, wide, 0
    searching = norm > 0
    while searching & (turn < PASSES):
        above = _lane_sum(x, begin, size, _one_from, cut, float("nan"))
        higher = _lane_sum(x, begin, size, _from, cut)
        split = (above > 0) & (above < wide)
        low = tl.where(split, _narrow((total - higher) / tl.maximum(wide - above, 1.0)), mean)
        high = tl.where(split, _narrow(higher / tl.maximum(above, 1.0)), mean)
        moved = _narrow((low + high) * 0.5)
        turn += 1
        searching = moved != cut
        cut = tl.where(searching & (turn < PASSES), moved, cut)
    lower = _lane_sum(x, begin, size, _below, cut) / tl.maximum(wide - above, 1.0)
    low = tl.where((above > 0) & (above < wide), _narrow(lower), low)
    row, usable = out + bucket * 3, norm > 0
    tl.store(row, tl.where(usable, low.to(tl.float32), norm))
    tl.store(row + 1, tl.where(usable, high.to(tl.float32), norm))
    tl.store(row + 2, tl.where(usable, cut.to(tl.float32), norm))


@triton.jit
def _split(ordered, low, high):
    """See reference.levels.split; places are int64, from the bucket's first coordinate on."""
    bottom, top = tl.load(ordered + low).to(tl.float64), tl.load(ordered + high)
    wide = top.to(tl.float64)
    missing = _lane_sum(ordered, low, high - low + 1, _short_of, wide, top)
    rank = tl.ceil(missing / tl.where(wide > bottom, wide - bottom, 1.0)).to(tl.int64)
    place = tl.minimum(tl.maximum(low + rank - 1, low), high)
    return tl.where(wide > bottom, place, (low + high) // 2)


@triton.jit
def _at(places, index, k):
    """Return the place of level k, k of any number."""
    return tl.sum(tl.where(index == k, places, 0))


@kernel
def _orq_kernel(
    x,
    norms,
    out,
    n: tl.int64,
    bucket_size: tl.int64,
    levels: tl.int32,
    sweeps: tl.int32,
    ROOM: tl.constexpr,
):
    """See reference.levels.orq_levels; x: the buckets' coordinates in order. ROOM: a power of two,
    not below ``levels``; places are kept in registers."""
    bucket, begin, size = _own_bucket(n, bucket_size)
    norm = tl.load(norms + bucket)
    usable = norm > 0
    ordered, index = x + begin, tl.arange(0, ROOM)
    last = levels - 1
    places = tl.where(index == last, size - 1, 0)
    # No search runs in a bucket without levels.
    step = tl.where(usable, last // 2, 0)
    while step > 0:
        for k in range(step, last, 2 * step):
            place = _split(ordered, _at(places, index, k - step), _at(places, index, k + step))
            places = tl.where(index == k, place, places)
        step = step // 2
    sweep, moving = 0, usable
    while moving & (sweep < sweeps):
        before = places
        for k in range(1, last):
            place = _split(ordered, _at(places, index, k - 1), _at(places, index, k + 1))
            places = tl.where(index == k, place, places)
        there = index < levels
        old = tl.load(ordered + before, mask=there, other=0.0)
        moving = tl.max((tl.load(ordered + places, mask=there, other=0.0) != old).to(tl.int32)) > 0
        sweep += 1
    found = tl.load(ordered + places, mask=index < levels, other=0.0)
    row = out + bucket * levels + index
    tl.store(row, tl.where(usable, found, norm), mask=index < levels)
