"""Compute the expected excess variance of a level table, its gradient, the measured variance, and
the probabilities of symbols (App. D and J), for entropy codes.

All results are per coordinate, in units of the bucket's squared norm, and folded. Over the law F of
r = |v_i|/||v||, which may have an atom at zero,

    symmetric   Psi = int_[0,l1] (l1^2 - r^2) dF + sum_j int_(lj,lj+1] (lj+1 - r)(r - lj) dF
    zero-based  Psi =                              sum_j int_(lj,lj+1] (lj+1 - r)(r - lj) dF

(ALQ paper, Eqs 3 and 29). In Eqs 29-31 and B.3 of the paper, F is the law of the *signed*
coordinate on its positive half, hence their factor 2. In that form Eqs 29-31 and 35 hold for even
densities only, and their F(l1) - F(0) omits an atom at zero, which costs l1^2 in a symmetric table.
The folded form is exact for any law. The paper's closed forms for (truncated) normals (Eqs 25, 34,
37, and B.3.1, which lacks +sigma^2 p(l1)) are these expressions in the moments of F over an
interval.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.magnitudes import check_magnitudes


def expected_variance(
    magnitudes: ArrayLike, distribution: Distribution, symmetric: bool
) -> Array | float:
    """Return Psi of a table (K,) as a float, or of each row of (..., K) as an array."""
    levels = check_magnitudes(magnitudes, symmetric)
    mass, mean, second = distribution.moments(levels)
    low, high = levels[..., :-1], levels[..., 1:]
    between = (low + high) * np.diff(mean) - np.diff(second) - low * high * np.diff(mass)
    total = between.sum(axis=-1)
    if symmetric:
        # In a zero-based table only zeros lie at or below the first level, and they are exact.
        total = total + levels[..., 0] ** 2 * mass[..., 0] - second[..., 0]
    return np.maximum(total, 0.0) if levels.ndim > 1 else float(max(total, 0.0))


def gradient(magnitudes: ArrayLike, distribution: Distribution, symmetric: bool) -> Array:
    """Return dPsi/dl_j in the shape of ``magnitudes``; 0 for the fixed levels 0 and 1.

    This is Eq. 6 (Eqs 30, 36, 37 and B.2 folded). The entry of l1 of a symmetric table is 2 l1
    F(l1) - int_(l1,l2] (l2 - r) dF (Eq. 30).
    """
    levels = check_magnitudes(magnitudes, symmetric)
    mass, mean, _ = distribution.moments(levels)
    # Derivatives of each interval's cost at its lower and its upper end, up to the sign.
    down = levels[..., 1:] * np.diff(mass) - np.diff(mean)
    up = np.diff(mean) - levels[..., :-1] * np.diff(mass)
    result = np.zeros_like(levels)
    result[..., 1:-1] = up[..., :-1] - down[..., 1:]
    if symmetric and levels.shape[-1] > 1:
        result[..., 0] = 2 * levels[..., 0] * mass[..., 0] - down[..., 0]
    return result


def hessian_bands(
    magnitudes: ArrayLike, distribution: Distribution, symmetric: bool
) -> tuple[Array, Array]:
    """Return the diagonal (..., K) of the Hessian of Psi, 0 for the fixed levels 0 and 1, and what
    lies beside it (..., K - 1), with the opposite sign.

    The Hessian is tridiagonal (Eq. 21 for two levels), with (l_{j+1} - l_{j-1}) p(l_j) on the
    diagonal and -(F(l_{j+1}) - F(l_j)) beside it. The diagonal entry of l1 of a symmetric table is
    (l1 + l2) p(l1) + 2 F(l1) (proof of Prop. 5).
    """
    levels = check_magnitudes(magnitudes, symmetric)
    mass, density = distribution.cdf(levels), distribution.pdf(levels)
    diagonal = np.zeros_like(levels)
    diagonal[..., 1:-1] = (levels[..., 2:] - levels[..., :-2]) * density[..., 1:-1]
    if symmetric and levels.shape[-1] > 1:
        sum_of_first = levels[..., 0] + levels[..., 1]
        diagonal[..., 0] = sum_of_first * density[..., 0] + 2 * mass[..., 0]
    return diagonal, np.diff(mass)


def curvature_bound(magnitudes: ArrayLike, distribution: Distribution, symmetric: bool) -> Array:
    """Return the Gershgorin bounds of the rows of Psi's Hessian, (..., K); 0 for fixed levels."""
    bound, beside = hessian_bands(magnitudes, distribution, symmetric)
    bound[..., 1:-1] += beside[..., :-1]
    bound[..., 1:-1] += beside[..., 1:]
    if symmetric and bound.shape[-1] > 1:
        bound[..., 0] += beside[..., 0]
    return bound


def sample_variance(
    magnitudes: ArrayLike, r: ArrayLike, symmetric: bool, weights: ArrayLike | None = None
) -> float:
    """Return the sum of sigma^2(r_i) times its weight, the variance that quantising adds.

    Source: ALQ Eqs 1, 2, 27, 28. Multiply by ||v||^2 for the variance of the vector v whose
    normalised coordinates are r. A sample outside [0, 1] raises ValueError. Weights have the shape
    of ``r``; they are 1 if None.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    r = np.asarray(r, dtype=np.float64)
    if not np.all((r >= 0) & (r <= 1)):
        raise ValueError("r: must lie within [0, 1]")
    # The level below the first one of a symmetric table is its negative: (l1 - r)(r + l1) = l1^2 -
    # r^2.
    table = np.concatenate([-levels[:1], levels]) if symmetric else levels
    above = np.clip(np.searchsorted(table, r, side="right"), 1, table.size - 1)
    variance = (table[above] - r) * (r - table[above - 1])
    return float(np.sum(variance if weights is None else variance * weights))


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
    folded = magnitude_probabilities(magnitudes, distribution, symmetric)
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
