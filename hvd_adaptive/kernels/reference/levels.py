"""Compute a bucket's levels from its coordinates (ORQ paper, 2020) in plain torch: the oracle.

The functions return a row per bucket (float32, (buckets, columns)). The row is zeros for a bucket
whose largest magnitude is below 2**-126, and NaN for a bucket with a coordinate that is not finite.
``clip`` clips the bucket first (reference.tables.clipped). Sums are float64, in the order of
``lane_sum``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hvd_adaptive.kernels.levels import (
    MOST_PASSES,
    NEGLIGIBLE,
    START_HIGH,
    START_LOW,
    TOLERANCE,
    quantiles,
    sorted_rows,
)
from hvd_adaptive.kernels.reference.tables import add_lanes, bucket_norms, clipped, rows_of


def orq_levels(
    flat: torch.Tensor, bucket_size: int, levels: int, clip: float | None, sweeps: int
) -> torch.Tensor:
    """Run Algorithm 1: the extremes, then the best level between two neighbours (``split``).

    levels: 2**K + 1. sweeps: the most rounds of coordinate descent that follow. In a round each
    inner level in turn becomes the best one between its neighbours; a round that moves none is the
    last.
    """

    def solve(bucket: torch.Tensor) -> list[float]:
        ordered = sorted_rows(bucket, bucket.numel())[0]
        last = levels - 1
        places = [0] * last + [len(ordered) - 1]
        step = last // 2
        while step:
            for k in range(step, last, 2 * step):
                places[k] = split(ordered, places[k - step], places[k + step])
            step //= 2
        for _ in range(sweeps):
            before = ordered[places]
            for k in range(1, last):
                places[k] = split(ordered, places[k - 1], places[k + 1])
            if torch.equal(ordered[places], before):
                break
        return ordered[places].tolist()

    return _per_bucket(flat, bucket_size, clip, levels, solve)


def split(ordered: torch.Tensor, low: int, high: int) -> int:
    """Return the place of the best level b between a = ordered[low] and c = ordered[high].

    Eq. 9's D(b) = sum_{v<=b} (v-a)(b-v) + sum_{v>b} (v-b)(c-v) over the n samples between a and c
    is convex, and linear between samples. Its slope there is sum_{v<b} (v-a) - sum_{v>b} (c-v) =
    (c-a) k - sum (c-v), if k samples are below b. So the best b is the sample of rank ceil(m), m =
    sum (c-v) / (c-a), at which the slope changes sign. Eq. 12 is equivalent, #{v >= b} = n - m, but
    as printed counts samples equal to b on both sides.
    """
    bottom, top = ordered[low].item(), ordered[high].item()
    if not top > bottom:
        return (low + high) // 2
    missing = lane_sum(top - ordered[low : high + 1].to(torch.float64))
    return min(max(low + math.ceil(missing / (top - bottom)) - 1, low), high)


def quantile_levels(
    flat: torch.Tensor, bucket_size: int, levels: int, clip: float | None
) -> torch.Tensor:
    """Return the quantiles at k/(levels-1), k = 0 ... levels-1, interpolated linearly."""
    flat = flat if clip is None else clipped(flat, bucket_size, clip)
    return quantiles(flat, bucket_norms(flat, bucket_size, "linf"), bucket_size, levels)


def mean_magnitudes(flat: torch.Tensor, bucket_size: int, clip: float | None) -> torch.Tensor:
    """Return Eq. 13's scale, the mean of |v|, as one column."""
    return _per_bucket(
        flat, bucket_size, clip, 1, lambda v: [lane_sum(v.abs().to(torch.float64)) / v.numel()]
    )


def symmetric_levels(flat: torch.Tensor, bucket_size: int, clip: float | None) -> torch.Tensor:
    """Return b_1 of Eq. 15 as one column: see ``symmetric_level``."""
    return _per_bucket(flat, bucket_size, clip, 1, lambda bucket: [symmetric_level(bucket)])


def symmetric_level(bucket: torch.Tensor) -> float:
    """Return b with n b = sum_{|v|>b} |v| (Eq. 15 for samples), by bracketed regula falsi.

    b minimises E(b) = sum_{|v|<=b} (b**2 - v**2) + sum_{|v|>b} (|v| - b)**2, which is convex with
    slope 2 (n b - sum_{|v|>b} |v|). With the mean magnitude m, n m - n b <= sum_{|v|>b} |v| <= n m,
    so b is from m/2 to m. E exceeds its least value by at most 2 |slope| times the bracket's width
    and is at least ``spread``, the squared deviation of the magnitudes from m. The loop ends by
    that bound.
    """
    n, wide = bucket.numel(), bucket.abs().to(torch.float64)
    total, squares = lane_sum(wide), lane_sum(wide * wide)
    mean = total / n
    spread = squares - total * mean
    if spread <= NEGLIGIBLE * squares:
        return mean

    low, high = _float32(mean / 2), _float32(mean)
    slope_low, slope_high = START_LOW * total, START_HIGH * total
    kept, level = 0, high
    for turn in range(MOST_PASSES):
        width = high - low
        part = 0.5 if turn % 4 == 3 else slope_low / (slope_low - slope_high)
        level = _float32(low + width * part)
        if level <= low or level >= high:
            level = _float32(low + width * 0.5)
            if level <= low or level >= high:
                return high
        slope = level * n - lane_sum(torch.where(wide > level, wide, 0.0))
        if 2 * abs(slope) * width <= TOLERANCE * spread:
            return level
        # The Illinois rule: an end that stays twice counts half.
        if slope < 0:
            low, slope_low = level, slope
            slope_high *= 0.5 if kept < 0 else 1.0
            kept = -1
        else:
            high, slope_high = level, slope
            slope_low *= 0.5 if kept > 0 else 1.0
            kept = 1
    return level


def conditional_means(
    flat: torch.Tensor, bucket_size: int, clip: float | None, iterate: bool
) -> torch.Tensor:
    """Return Eq. 17's columns b_-1, b_1 and b_0, the means of {v < b_0} and {v >= b_0}, and b_0.

    b_0 is the mean. If ``iterate``, b_0 is moved to (b_-1 + b_1)/2 until it stays: then all of Eq.
    17 holds. A constant bucket has b_-1 = b_1.
    """

    def solve(bucket: torch.Tensor) -> list[float]:
        wide = bucket.to(torch.float64)
        n, total = len(wide), lane_sum(wide)
        mean = _float32(total / n)
        cut = low = high = mean
        for turn in range(MOST_PASSES if iterate else 1):
            if turn > 0:
                moved = _float32((low + high) * 0.5)
                if moved == cut:
                    break
                cut = moved
            above = wide >= cut
            count = int(above.sum())
            low = high = mean
            if 0 < count < n:
                higher = lane_sum(torch.where(above, wide, 0.0))
                low, high = _float32((total - higher) / (n - count)), _float32(higher / count)
        if 0 < count < n:  # the difference of sums is too coarse beside an outlier
            low = _float32(lane_sum(torch.where(above, 0.0, wide)) / (n - count))
        return [low, high, cut]

    return _per_bucket(flat, bucket_size, clip, 3, solve)


def lane_sum(values: torch.Tensor) -> float:
    """Sum float64 values: lane l adds values[l], values[l + 32], ..., a tree adds the lanes."""
    return add_lanes(rows_of(values, values.numel(), values.dtype)).item()


def _per_bucket(
    flat: torch.Tensor,
    bucket_size: int,
    clip: float | None,
    columns: int,
    solve: Callable[[torch.Tensor], Sequence[float]],
) -> torch.Tensor:
    """Return a row from ``solve`` for every bucket that has levels."""
    if clip is not None:
        flat = clipped(flat, bucket_size, clip)
    norms = bucket_norms(flat, bucket_size, "linf")
    rows = norms.view(-1, 1).repeat(1, columns)
    for b in (norms > 0).nonzero().flatten().tolist():
        row = solve(flat[b * bucket_size : (b + 1) * bucket_size])
        rows[b] = torch.tensor(row, dtype=torch.float64, device="cpu").to(torch.float32)
    return rows


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64, device="cpu").to(torch.float32).item()
