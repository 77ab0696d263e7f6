"""The expected excess variance of a level table, its gradient, and the variance measured.

All of it per coordinate in units of the bucket's squared norm, and folded: over the law F of
r = |v_i|/||v||, which may have an atom at zero,

    symmetric   Psi = int_[0,l1] (l1^2 - r^2) dF + sum_j int_(lj,lj+1] (lj+1 - r)(r - lj) dF
    zero-based  Psi =                              sum_j int_(lj,lj+1] (lj+1 - r)(r - lj) dF

(ALQ paper, Eq. 3 and 29). The paper's factor 2 in Eqs 29-31 and B.3 comes of F being there the law
of the *signed* coordinate on its positive half; Eqs 29-31 and 35 hold so only for even densities,
and their F(l1) - F(0) leaves out an atom at zero, which costs l1^2 in a symmetric table. Folded,
everything is exact for any law. The paper's closed forms for (truncated) normals (Eqs 25, 34, 37,
B.3.1 with its +sigma^2 p(l1) missing) are these expressions in the moments of F over an interval.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.magnitudes import check_magnitudes


def expected_variance(
    magnitudes: ArrayLike, distribution: Distribution, symmetric: bool
) -> Array | float:
    """Psi of a table (K,), or of each row of (..., K)."""
    levels = check_magnitudes(magnitudes, symmetric)
    mass, mean, second = distribution.moments(levels)
    low, high = levels[..., :-1], levels[..., 1:]
    between = (low + high) * np.diff(mean) - np.diff(second) - low * high * np.diff(mass)
    total = between.sum(axis=-1)
    if symmetric:
        # A zero-based table has no coordinates below its first level but zeros, which are exact.
        total = total + levels[..., 0] ** 2 * mass[..., 0] - second[..., 0]
    return np.maximum(total, 0.0) if levels.ndim > 1 else float(max(total, 0.0))


def gradient(magnitudes: ArrayLike, distribution: Distribution, symmetric: bool) -> Array:
    """dPsi/dl_j, shape of magnitudes; 0 for the levels that do not move (0 and 1).

    Eq. 6 (Eqs 30, 36, 37 and B.2 folded), and for l1 of a symmetric table
    2 l1 F(l1) - int_(l1,l2] (l2 - r) dF (Eq. 30).
    """
    levels = check_magnitudes(magnitudes, symmetric)
    mass, mean, _ = distribution.moments(levels)
    # Pull of each interval on its lower and its upper end.
    down = levels[..., 1:] * np.diff(mass) - np.diff(mean)
    up = np.diff(mean) - levels[..., :-1] * np.diff(mass)
    result = np.zeros_like(levels)
    result[..., 1:-1] = up[..., :-1] - down[..., 1:]
    if symmetric and levels.shape[-1] > 1:
        result[..., 0] = 2 * levels[..., 0] * mass[..., 0] - down[..., 0]
    return result


def curvature_bound(magnitudes: ArrayLike, distribution: Distribution, symmetric: bool) -> Array:
    """Gershgorin bound of the Hessian of Psi, row by row, shape of magnitudes.

    The Hessian is tridiagonal (Eq. 21 for two levels): (l_{j+1} - l_{j-1}) p(l_j) on the diagonal,
    for l1 of a symmetric table (l1 + l2) p(l1) + 2 F(l1) (proof of Prop. 5), and
    -(F(l_{j+1}) - F(l_j)) beside it. The bound is the sum of a row's absolute values.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    mass, density = distribution.cdf(levels), distribution.pdf(levels)
    beside = np.diff(mass)
    result = np.zeros_like(levels)
    gaps = levels[..., 2:] - levels[..., :-2]
    result[..., 1:-1] = gaps * density[..., 1:-1] + beside[..., :-1] + beside[..., 1:]
    if symmetric and levels.shape[-1] > 1:
        sum_of_first = levels[..., 0] + levels[..., 1]
        result[..., 0] = sum_of_first * density[..., 0] + 2 * mass[..., 0] + beside[..., 0]
    return result


def sample_variance(
    magnitudes: ArrayLike, r: ArrayLike, symmetric: bool, weights: ArrayLike | None = None
) -> float:
    """Sum of sigma^2(r_i), each times its weight: what quantising adds (Eqs 1, 2, 27, 28).

    r: samples in [0, 1], any shape; weights: the same shape. Times ||v||^2 it is the variance of
    the vector v whose coordinates r are. Samples outside [0, 1]: ValueError.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    r = np.asarray(r, dtype=np.float64)
    if not np.all((r >= 0) & (r <= 1)):
        raise ValueError("r: must lie within [0, 1]")
    # Below the first level of a symmetric table lies its negative: (l1 - r)(r + l1) = l1^2 - r^2.
    table = np.concatenate([-levels[:1], levels]) if symmetric else levels
    above = np.clip(np.searchsorted(table, r, side="right"), 1, table.size - 1)
    variance = (table[above] - r) * (r - table[above - 1])
    return float(np.sum(variance if weights is None else variance * weights))
