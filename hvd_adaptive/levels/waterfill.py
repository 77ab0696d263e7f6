"""Divide bits among buckets so that the sum of their squared errors is least.

This is reverse water-filling (Cover and Thomas, Elements of Information Theory, section 10.3.3) for
quantisers with given errors.

A bucket of n coordinates and energy e has the error d_b e at b bits per coordinate, with d_b of
``losses``. At the multiplier λ, b + 1 bits are better than b if (d_b - d_{b+1}) e > λ n. A bucket
with less than one bit is sent with 1 bit and the chance p, as 1/p times its estimate, so that it
stays unbiased. Its error then is ((1 + d_1)/p - 1) e, and e (1 + d_1)/p + λ n p is least at
p = sqrt((1 + d_1) e/(λ n)).

As λ grows, bits fall: by a whole bit of a bucket at λ = (d_b - d_{b+1}) e/n, and continuously from
λ = (1 + d_1) e/n on, where p = 1. Between two of these points the bits are c_0 + c_1/sqrt(λ), so
that λ is found without iteration.
"""

from __future__ import annotations

import numpy as np


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
            most ``bits`` times the sum of lengths, up to rounding.

    A chance is 1, or below 1 with a width of 1.
    """
    density = energies / lengths
    budget = float(bits * lengths.sum())
    used = density > 0
    widths, chances = np.zeros(len(density), np.int64), np.zeros(len(density))
    if not used.any():
        return widths, chances
    gains, counts = losses[:-1] - losses[1:], lengths[used].astype(np.float64)
    # Equal buckets would all change at the same λ: those that come later count for a little more.
    own = density[used] * (1 + 1e-9 * np.arange(used.sum()))
    steps, sampled = np.outer(own, gains), (1 + losses[0]) * own
    multiplier = _multiplier(sampled, steps, counts, budget)
    found = 1 + np.count_nonzero(steps > multiplier, axis=1)
    # One bucket's next bit may be too much; buckets of less than one bit take what is left.
    few = found <= 1
    left = budget - float(found[~few] @ counts[~few])
    few_sampled, nothing = sampled[few], np.empty((few.sum(), 0))
    multiplier = _multiplier(few_sampled, nothing, counts[few], left)
    widths[used], chances[used] = found, 1.0
    if multiplier > 0:
        chances[np.flatnonzero(used)[few]] = np.minimum(np.sqrt(few_sampled / multiplier), 1.0)
    return widths, chances


def multiplier_of(
    energies: np.ndarray, lengths: np.ndarray, losses: np.ndarray, bits: float
) -> float:
    """Return the least λ at which ``spend`` takes at most ``bits`` on average, above 0.

    Args:
        energies: See ``allocate``; at least one is not 0.
        lengths: Numbers of coordinates (buckets,).
        losses: See ``allocate``.
        bits: Mean bits per coordinate, above 0.
    """
    used = energies > 0
    density, counts = (energies / lengths)[used], lengths[used].astype(np.float64)
    steps = np.outer(density, losses[:-1] - losses[1:])
    found = _multiplier((1 + losses[0]) * density, steps, counts, float(bits * lengths.sum()))
    # 0 stands for any λ below all points.
    return found or float(steps.min(initial=density.min())) / 2


def spend(
    energies: np.ndarray, lengths: np.ndarray, losses: np.ndarray, multiplier: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return widths (int64) and chances (float64) of buckets at the multiplier λ.

    Args:
        energies: See ``allocate``.
        lengths: Numbers of coordinates (buckets,).
        losses: See ``allocate``.
        multiplier: λ, above 0.
    """
    density = energies / lengths
    used = density > 0
    gains = losses[:-1] - losses[1:]
    widths = np.where(used, 1 + np.count_nonzero(np.outer(density, gains) > multiplier, axis=1), 0)
    chances = np.minimum(np.sqrt((1 + losses[0]) * density / multiplier), 1.0)
    return widths, chances


def _multiplier(sampled: np.ndarray, steps: np.ndarray, counts: np.ndarray, budget: float) -> float:
    """Return the least λ at which no more than ``budget`` bits are spent; 0 if any λ does.

    Args:
        sampled: The λ of each bucket from which on it is sampled (buckets,).
        steps: The λ at which it loses each bit beyond the first (buckets, bits - 1).
        counts: Numbers of coordinates (buckets,).
        budget: The bits, above 0 if there are buckets.
    """
    whole = float(counts.sum()) * (1 + steps.shape[1])
    if whole <= budget:
        return 0.0
    points = np.concatenate([sampled, steps.ravel()])
    lost = np.concatenate([counts, np.repeat(counts, steps.shape[1])])
    roots = np.concatenate([counts * np.sqrt(sampled), np.zeros(steps.size)])
    order = np.argsort(points)
    points = points[order]
    # At each point and up to the next one the bits are constant + root / sqrt(λ).
    constant, root = whole - np.cumsum(lost[order]), np.cumsum(roots[order])
    enough = np.flatnonzero(constant + root / np.sqrt(points) <= budget)
    last = enough[0] - 1 if enough.size else len(points) - 1
    if last < 0:
        return float(points[0])
    highest = points[enough[0]] if enough.size else np.inf
    if (spare := budget - constant[last]) > 0:
        highest = min((root[last] / spare) ** 2, highest)
    return float(max(highest, points[last]))


def sample(chances: np.ndarray, uniform: float) -> np.ndarray:
    """Return which buckets are sent: each with its chance, and as many as their sum within 1.

    Systematic sampling (Madow and Madow 1944): a bucket is sent if the chances' cumulated sum, from
    ``uniform`` of [0, 1) on, passes a whole number in it.
    """
    ends = np.floor(np.cumsum(chances) + uniform)
    return np.diff(ends, prepend=np.floor(uniform)) > 0
