"""How often each symbol occurs: what entropy codes are built from (ALQ paper, App. D and J)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import entr

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.magnitudes import check_magnitudes


def symbol_probabilities(
    magnitudes: ArrayLike, distribution: Distribution, symmetric: bool
) -> Array:
    """Probabilities of the signed levels in ascending order; they sum to one.

    symmetric: 2K values (Prop. 8); otherwise 2K - 1 with one zero (Prop. 6, nonzero magnitudes
    split evenly between the signs). Of the closed forms for truncated normals (Cor. 3, Cor. 4,
    whose Pr(l1) lacks -sigma^2 (p(l1) - p(-l1)) in its second term) only the moments over each
    interval are left. The folded law knows no signs: both are taken to be equally likely, as
    Prop. 8 assumes. For any law of signs the sum over +-l is right, except that in a symmetric
    table a mean other than zero tilts every pair.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    folded = magnitude_probabilities(levels, distribution, symmetric)
    halves = folded / 2
    if symmetric:
        return np.concatenate([halves[::-1], halves])
    return np.concatenate([halves[:0:-1], folded[:1], halves[1:]])


def magnitude_probabilities(
    magnitudes: ArrayLike, distribution: Distribution, symmetric: bool
) -> Array:
    """Probabilities (K,) of the magnitudes, signs put together: Prop. 6.

    Symmetric: everything in [0, l1] becomes +-l1, so Pr(l1) starts with all of F(l1).
    """
    levels = check_magnitudes(magnitudes, symmetric)
    mass, mean, _ = distribution.moments(levels)
    low, high = levels[:-1], levels[1:]
    within = np.diff(mass)
    up = np.clip((np.diff(mean) - low * within) / (high - low), 0.0, within)
    result = np.zeros_like(levels)
    # What lies at or below the first level: its atom at zero, or the whole of [0, l1].
    result[0] = mass[0]
    result[1:] += up
    result[:-1] += within - up
    return result / result.sum()


def entropy_bits(probabilities: ArrayLike) -> float:
    """Entropy in bits per symbol; zero probabilities count nothing."""
    return float(entr(np.asarray(probabilities, dtype=np.float64)).sum() / np.log(2))
