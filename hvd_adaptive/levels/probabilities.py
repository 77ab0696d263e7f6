"""Compute the probabilities of symbols, for entropy codes (ALQ paper, App. D and J)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.magnitudes import check_magnitudes


def symbol_probabilities(
    magnitudes: ArrayLike, distribution: Distribution, symmetric: bool
) -> Array:
    """Return the probabilities of the signed levels in ascending order; they sum to one.

    A symmetric table has 2K symbols (Prop. 8). A zero-based table has 2K - 1 with one zero (Prop.
    6); each nonzero magnitude is split evenly between the signs. The closed forms for truncated
    normals (Cor. 3, and Cor. 4, whose Pr(l1) lacks -sigma^2 (p(l1) - p(-l1)) in its second term)
    reduce to the moments over each interval.

    The folded law has no signs. Both are assumed to be equally likely, as in Prop. 8. For any law
    of signs, the sum over +-l is right, with one exception: in a symmetric table a nonzero mean
    tilts every pair.
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
    """Return the probabilities (K,) of the magnitudes, summed over both signs (Prop. 6).

    In a symmetric table every coordinate in [0, l1] becomes +-l1, so Pr(l1) includes all of F(l1).
    """
    levels = check_magnitudes(magnitudes, symmetric)
    mass, mean, _ = distribution.moments(levels)
    low, high = levels[:-1], levels[1:]
    within = np.diff(mass)
    up = np.clip((np.diff(mean) - low * within) / (high - low), 0.0, within)
    result = np.zeros_like(levels)
    # The mass at or below the first level: the atom at zero, or the whole of [0, l1].
    result[0] = mass[0]
    result[1:] += up
    result[:-1] += within - up
    return result / result.sum()


def entropy_bits(probabilities: ArrayLike) -> float:
    """Return the entropy in bits per symbol; zero probabilities contribute nothing."""
    from scipy.special import entr  # slow to import, and only code books need it

    return float(entr(np.asarray(probabilities, dtype=np.float64)).sum() / np.log(2))
