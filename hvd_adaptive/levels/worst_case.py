"""Bound the variance of a table for every vector, and provide the table whose bound is least."""

from __future__ import annotations

import functools

import numpy as np

from hvd_adaptive.levels.distributions import Array
from hvd_adaptive.levels.magnitudes import LEAST_LEVEL, exponential_magnitudes

# Multipliers that are compared, as multiples of 1/_PARTS: sums of powers of two.
_PARTS = 256


def worst_variance(magnitudes: Array, spread: float, symmetric: bool) -> float:
    """Return the bound of ALQ Theorem 2 (symmetric: Theorem 9) on E||Q(v) - v||^2 / ||v||^2.

    Above the first positive level, (high - r)(r - low) <= (ratio - 1)^2 / (4 ratio) r^2 (Eq. 40).
    Below it, the cost is ``small_coordinates``, or l1^2 for each of the coordinates of a symmetric
    table. ``spread`` is d**(1/min(q, 2)) for d coordinates and Lq normalisation.
    """
    positive = magnitudes if symmetric else magnitudes[1:]
    ratio = np.max(positive[1:] / positive[:-1], initial=1.0)
    reach = float(positive[0] * spread)
    small = reach**2 if symmetric else small_coordinates(reach)
    return float((ratio - 1) ** 2 / (4 * ratio)) + small


def small_coordinates(reach: float) -> float:
    """Return inf over 0 < p < 1 of K_p reach**(2 - p), the cost bound of coordinates in [0, l1].

    Source: ALQ Theorem 2. ``reach`` is l1 d**(1/min(q, 2)). The logarithm is convex in p; its
    derivative is -log((1 - p)/(2 - p)) - log(reach), since the other terms cancel. If reach > 2,
    the infimum is at (1 - p)/(2 - p) = 1/reach and equals reach - 1. Otherwise it is at p -> 0,
    where K_p -> 1/4. For q = 2 the bound is attained. From reach 2 on, d equal coordinates r =
    d**(-1/2) attain it: n equal coordinates cost sqrt(n) l1 - 1, which is largest at n = d. Below
    reach 2, d coordinates r = l1/2 attain it if one more coordinate holds the rest of the norm.
    """
    return reach - 1 if reach > 2 else reach**2 / 4


@functools.cache
def safe_magnitudes(count: int, symmetric: bool, dimension: int) -> tuple[float, ...]:
    """Return the exponential table of ``count`` magnitudes, >= 2, whose bound on the variance of
    any vector is least: for buckets of ``dimension`` coordinates, the L2 and the L-infinity norm,
    before any fit.
    """
    tables = [exponential_magnitudes(count, k / _PARTS, symmetric) for k in range(1, _PARTS)]
    positive = [t for t in tables if t[0 if symmetric else 1] >= LEAST_LEVEL]
    spread = dimension**0.5
    return tuple(min(positive, key=lambda t: worst_variance(t, spread, symmetric)).tolist())
