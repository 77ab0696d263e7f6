"""Worst-case bounds: variance (ALQ Theorems 2, 9) and code length (Theorems 3, 10)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Distribution
from hvd_adaptive.levels.magnitudes import check_magnitudes
from hvd_adaptive.levels.probabilities import (
    entropy_bits,
    magnitude_probabilities,
    symbol_probabilities,
)


def variance_bound(
    magnitudes: ArrayLike, dimension: int, norm_order: float, symmetric: bool
) -> float:
    """epsilon_Q with E||Q(v) - v||_2^2 <= epsilon_Q ||v||_2^2 for every v of ``dimension``.

    norm_order: q >= 1 of the normalising Lq norm, np.inf allowed. Theorem 2; symmetric: Theorem 9.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    _check(dimension, norm_order)
    positive = levels if symmetric else levels[1:]
    ratio = np.max(positive[1:] / positive[:-1], initial=1.0)
    between = (ratio - 1) ** 2 / (4 * ratio)
    reach = positive[0] * dimension ** (1 / min(norm_order, 2))
    return float(between + (reach**2 if symmetric else _small_coordinates(reach)))


def _small_coordinates(reach: float) -> float:
    """inf over 0 < p < 1 of K_p reach**(2 - p), K_p as in Theorem 2 (Eq. 41).

    The logarithm is convex in p, its derivative -log((1 - p)/(2 - p)) - log(reach) (the other
    terms cancel). So where reach > 2 the infimum is at (1 - p)/(2 - p) = 1/reach and equals
    reach - 1; otherwise at p -> 0, where K_p -> 1/4.
    """
    return reach - 1 if reach > 2 else reach**2 / 4


def code_length_bound(
    magnitudes: ArrayLike,
    dimension: int,
    norm_order: float,
    symmetric: bool,
    distribution: Distribution | None = None,
    norm_bits: int = 32,
) -> float:
    """Bits that an optimal prefix code needs at most, in expectation, for one vector.

    Theorem 3 (symbols are magnitudes, a sign bit follows each nonzero one); symmetric: Theorem 10
    (symbols are signed levels). distribution: for the entropy H(L); without it the looser form in
    the number of symbols. norm_bits: b, the bits of the norm.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    _check(dimension, norm_order)
    if symmetric:
        symbols, signs = 2 * levels.size, 0.0
        probabilities = symbol_probabilities
    else:
        symbols, signs = levels.size, nonzero_bound(levels, dimension, norm_order)
        probabilities = magnitude_probabilities
    entropy = (
        float(np.log2(symbols))
        if distribution is None
        else entropy_bits(probabilities(levels, distribution, symmetric))
    )
    return norm_bits + signs + dimension * (entropy + 1)


def nonzero_bound(magnitudes: ArrayLike, dimension: int, norm_order: float) -> float:
    """Nonzero coordinates of a zero-based Q(v), at most, in expectation: Lemma 3, n_{l1,d}."""
    levels = check_magnitudes(magnitudes, symmetric=False)
    _check(dimension, norm_order)
    with np.errstate(over="ignore"):  # l1**-inf is meant: no bound but d
        large = levels[1] ** -float(norm_order)
    return float(min(large + dimension ** (1 - 1 / norm_order) / levels[1], dimension))


def _check(dimension: int, norm_order: float) -> None:
    if dimension < 1:
        raise ValueError(f"dimension: must be at least 1, not {dimension!r}")
    if not norm_order >= 1:
        raise ValueError(f"norm_order: must be at least 1, not {norm_order!r}")
