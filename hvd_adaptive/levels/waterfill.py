"""Divide bits among buckets so that the sum of their squared errors is least.

This is reverse water-filling (Cover and Thomas, Elements of Information Theory, section 10.3.3) for
quantisers with given errors.

A bucket of n coordinates and energy e has the error d_b e at b bits per coordinate, with d_b of
``losses``. At the multiplier λ, b + 1 bits are better than b if (d_b - d_{b+1}) e > λ n. A bucket
with less than one bit is sent with 1 bit and the chance p, as 1/p times its estimate, so that it
stays unbiased. Its error then is ((1 + d_1)/p - 1) e, and e (1 + d_1)/p + λ n p is least at
p = sqrt((1 + d_1) e/(λ n)). The bits fall as λ grows, so λ is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable

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
    gains, loss = losses[:-1] - losses[1:], losses[0]
    # Equal buckets would all change at the same λ: those that come later count for a little more.
    own = density[used] * (1 + 1e-9 * np.arange(used.sum()))
    counts = lengths[used]
    # At the lowest λ all buckets have all bits; at the highest one at most min(1, bits) each.
    low = np.log(own.min() * gains[-1]) - 1
    high = np.log(own.max() * (1 + loss)) - 2 * min(np.log(bits), 0.0)

    def spent(log: float) -> float:
        whole, chances = _widths(log, own, gains), _chances(log, own, loss)
        return float(np.where(whole > 1, whole, chances) @ counts)

    multiplier = _least(spent, low, high, budget)
    found = _widths(multiplier, own, gains)
    # One bucket's next bit may be too much; buckets of less than one bit take what is left.
    few = found <= 1
    left = budget - found[~few] @ counts[~few]

    def sampled(log: float) -> float:
        return float(_chances(log, own[few], loss) @ counts[few])

    multiplier = _least(sampled, low - 1, multiplier, left)
    widths[used], chances[used] = found, 1.0
    chances[np.flatnonzero(used)[few]] = _chances(multiplier, own[few], loss)
    return widths, chances


def _least(spent: Callable[[float], float], low: float, high: float, budget: float) -> float:
    """Return the least log λ at which no more than ``budget`` is spent; it is at most ``high``."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if spent(middle) <= budget else (middle, high)
    return high


def _widths(log: float, density: np.ndarray, gains: np.ndarray) -> np.ndarray:
    return 1 + np.searchsorted(np.exp(log) / gains, density)


def _chances(log: float, density: np.ndarray, loss: float) -> np.ndarray:
    return np.minimum(np.sqrt((1 + loss) * np.exp(-log) * density), 1.0)


def sample(chances: np.ndarray, uniform: float) -> np.ndarray:
    """Return which buckets are sent: each with its chance, and as many as their sum within 1.

    Systematic sampling (Madow and Madow 1944): a bucket is sent if the chances' cumulated sum, from
    ``uniform`` of [0, 1) on, passes a whole number in it.
    """
    ends = np.floor(np.cumsum(chances) + uniform)
    return np.diff(ends, prepend=np.floor(uniform)) > 0
