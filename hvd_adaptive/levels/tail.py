"""Correct the tail of a sample's law, so that fits do not adapt to single coordinates.

A histogram of n coordinates has no mass above its largest one, and single coordinates far apart
below it. The best table for such a law puts levels on these coordinates and leaves gaps between
them and 1. A new coordinate falls into a gap from a to c with a probability of about 1/n, and then
adds (c - r)(r - a): at 8 bits this exceeds the cost of all others together. Two corrections are
made.

The tail: the excesses log(r/t) of common laws over a high threshold t are approximately exponential
(Pickands 1975, Hill 1975). This is exact for Pareto tails, and holds with a large exponent for
normal laws. Since no r is above 1, the tail is a Pareto law truncated there (Aban, Meerschaert,
Panorska 2006),

    P(r > x | r > t) = ((x/t)^-a - t^a) / (1 - t^a),  t <= x <= 1.

The prior: buckets come in kinds, such as the layers of a model, and n buckets do not show all
kinds. By the rule of succession the next bucket is of a new kind with a probability of about 1/n.
Only its sum of r^2 is known. This sum is spread evenly over log r above t, which is a density of
r^-3. Its cube root, 1/r, is the density of the best table's levels (``fit.cube_root``), which is
AMQ's geometric table. So gaps stay bounded relative to their levels, more tightly for fewer
buckets.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import LOG_BINS, LOG_EDGES, Array, Histogram

# Number of coordinates from which the exponent is estimated: its standard error is a / sqrt(TAIL).
TAIL = 40
# Weight of the prior in buckets. If levels are few, the prior costs its share of the variance; if
# they are many, the cube root gives a small share many levels. Chosen by benchmarks/fresh_data.py:
# 1 loses to AMQ at 2 to 4 bits of heavy tails, 0.03 at 8 bits of some samples of layered buckets.
PRIOR = 0.1
# Upper limit of the prior's start, so that the prior has room.
_HIGHEST = 0.5
# Range of the exponent times log(1/t): the least is a uniform law of log r, to four digits.
_LEAST, _MOST = 1e-4, 1e12
# Least share of a bin: a smaller share would round to zero.
_LEAST_SHARE = 2.0**-20
_MEAN_SQUARES = (LOG_EDGES[:-1] ** 2 + LOG_EDGES[:-1] * LOG_EDGES[1:] + LOG_EDGES[1:] ** 2) / 3


def with_tail(counts: ArrayLike, squares: ArrayLike, buckets: float) -> Histogram:
    """Return the law of weighted coordinates: their histogram with a new tail and the prior.

    The ``TAIL`` largest coordinates below 1 become the truncated Pareto law with their mass and
    their mean of log r (maximum likelihood). All other coordinates and the atoms stay, so the law
    converges to the histogram as samples grow.

    Args:
        counts: (LOG_BINS + 2,), sums of weights on ``LOG_EDGES``, then of zeros and of ones.
        squares: (LOG_BINS + 2,), sums of squared weights. A negative sum raises ValueError.
        buckets: Number of buckets, by Kish's effective number (sum w)^2 / sum w^2. Coordinates are
            counted by the same formula.
    """
    counts, squares = np.asarray(counts, float), np.asarray(squares, float)
    for name, own in (("counts", counts), ("squares", squares)):
        if (own < 0).any():
            raise ValueError(f"{name}: must not be negative, not {own.min():g}")
    masses = counts[:LOG_BINS].copy()
    largest, start = _largest(masses, squares[:LOG_BINS])
    if largest.any():
        energy = masses @ _MEAN_SQUARES + counts[-1]
        # P(r > x | r > start) at the edges.
        exponent = _exponent(largest, start)
        above, at_one = (np.maximum(LOG_EDGES, start) / start) ** -exponent, start**exponent
        survival = (above - at_one) / (1 - at_one)
        masses += largest.sum() * -np.diff(survival) - largest
        # The prior: a density of r^-3 from the start to 1, whose r^2 sums to one.
        prior = -np.diff(np.maximum(LOG_EDGES, min(start, _HIGHEST)) ** -2.0)
        masses += PRIOR / (buckets + 1) * energy * (prior / (prior @ _MEAN_SQUARES))
    return Histogram(LOG_EDGES, np.maximum(masses, 0.0), *counts[LOG_BINS:])


def _largest(masses: Array, squares: Array) -> tuple[Array, float]:
    """Return the mass of each bin that belongs to the largest coordinates, and their lower end."""
    sums, sums_of_squares = np.cumsum(masses[::-1]), np.cumsum(squares[::-1])
    enough = np.flatnonzero((sums_of_squares > 0) & (sums**2 >= TAIL * sums_of_squares))
    # Bin 0 begins at zero, so no finite ratio to a coordinate exists there.
    last = max(LOG_BINS - 1 - enough[0] if enough.size else 0, 1)
    mass, square = masses[last], squares[last]
    share = 1.0
    if enough.size and mass > 0:
        # (before + share mass)^2 = TAIL (squares before + share square), solved for the share.
        before = sums[LOG_BINS - 1 - last] - mass
        half = before / mass - TAIL * square / mass**2 / 2
        rest = (TAIL * (sums_of_squares[LOG_BINS - 1 - last] - square) - before**2) / mass**2
        share = np.clip(np.sqrt(half**2 + max(rest, 0.0)) - half, _LEAST_SHARE, 1.0)
    largest = np.where(np.arange(LOG_BINS) > last, masses, 0.0)
    largest[last] = share * mass
    used = int(np.flatnonzero(largest)[0]) if largest.any() else last
    upper, width = LOG_EDGES[used + 1], LOG_EDGES[used + 1] - LOG_EDGES[used]
    return largest, float(upper - (share if used == last else 1.0) * width)


def _exponent(largest: Array, start: float) -> float:
    """Return the maximum-likelihood exponent: the law's mean of log(r/start) equals the samples'.

    With u = a log(1/start) the mean is log(1/start) (1/u - 1/(e^u - 1)), which decreases from one
    half of log(1/start) at u = 0.
    """
    middles = (np.maximum(LOG_EDGES[:-1], start) + np.maximum(LOG_EDGES[1:], start)) / 2
    reach = -np.log(start)
    wanted = float(largest @ np.log(middles / start) / largest.sum() / reach)
    low, high = _LEAST, _MOST
    if _mean_of(low) <= wanted:
        return low / reach
    # Bisection to the last bit; importing SciPy's root finders would take longer than a fit.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _mean_of(middle) > wanted else (low, middle)
    return low / reach


def _mean_of(u: float) -> float:
    return 1 / u + math.exp(-u) / math.expm1(-u)
