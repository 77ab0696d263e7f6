"""Divide bits among buckets so that the sum of their squared errors is least (reverse water-filling;
Cover and Thomas, Elements of Information Theory, section 10.3.3).

A bucket of n coordinates and energy e has the error d_b e at b bits per coordinate, with d_b of
``losses``. At the multiplier λ, b + 1 bits are better than b if (d_b - d_{b+1}) e > λ n. A bucket
with less than one bit is sent with 1 bit and the chance p, as 1/p times its estimate, so that it
stays unbiased. Its error then is ((1 + d_1)/p - 1) e, and e (1 + d_1)/p + λ n p is least at
p = sqrt((1 + d_1) e/(λ n)). The bits fall as λ grows, so λ is found by bisection.
"""

from __future__ import annotations

import numpy as np

_HALVINGS = 60


def allocate(
    energies: np.ndarray, lengths: np.ndarray, losses: np.ndarray, bits: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return widths (int64) and chances (float64) of buckets, of at most ``bits`` on average.

    Args:
        energies: Squared norms, finite, float64 (buckets,). Those of 0 get a width and a chance of
            0.
        lengths: Numbers of coordinates (buckets,).
        losses: d_1, d_2, ..., descending: relative errors at 1, 2, ... bits.
        bits: Mean bits per coordinate over all buckets: the sum of width · chance · length is at
            most ``bits`` times the sum of lengths.

    A chance is 1, or below 1 with a width of 1.
    """
    density = energies / lengths
    budget = bits * lengths.sum()
    used = density > 0
    widths, chances = np.zeros(len(density), np.int64), np.zeros(len(density))
    if not used.any():
        return widths, chances
    gains = losses[:-1] - losses[1:]
    own, counts = density[used], lengths[used]
    # At the lowest λ all buckets have all bits; at the highest one less than 1e-9 of a bit each.
    low, high = np.log(own.min() * gains[-1]) - 1, np.log(own.max() * (1 + losses[0])) + 42 - 2 * min(np.log(bits), 0)
    found = _at(np.exp(high), own, losses[0], gains)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = _at(np.exp(middle), own, losses[0], gains)
        if (tried[0] * tried[1]) @ counts <= budget:
            high, found = middle, tried
        else:
            low = middle
    widths[used], chances[used] = found
    return widths, chances


def _at(
    multiplier: float, density: np.ndarray, loss: float, gains: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return widths and chances at λ = ``multiplier``."""
    widths = 1 + np.searchsorted(multiplier / gains, density)
    chances = np.minimum(np.sqrt((1 + loss) / multiplier * density), 1.0)
    return widths, np.where(widths > 1, 1.0, chances)


def sample(chances: np.ndarray, uniform: float) -> np.ndarray:
    """Return which buckets are sent: each with its chance, and as many as their sum within 1.

    Systematic sampling (Madow and Madow 1944): a bucket is sent if the chances' cumulated sum, from
    ``uniform`` of [0, 1) on, passes a whole number in it.
    """
    ends = np.floor(np.cumsum(chances) + uniform)
    return np.diff(ends, prepend=np.floor(uniform)) > 0
