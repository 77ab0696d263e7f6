"""Test whether the choice of levels is convex, and compute the gain of the best single level.

ALQ Theorem 1: Psi (Eq. 3) is not convex in all levels together in general, but convex in each one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_adaptive.levels import Distribution, expected_variance
from hvd_adaptive.levels.objective import hessian_bands
from hvd_adaptive.theory.arguments import check_count, check_positive


def objective_hessian(
    magnitudes: ArrayLike, distribution: Distribution, symmetric: bool = False
) -> NDArray[np.float64]:
    """Return the second derivatives (m, m) of Psi in the m movable levels, all but 0 and 1.

    This is Eq. 21 for any number of levels; ``levels.objective.hessian_bands`` describes the
    matrix, which is tridiagonal. It exists if the density is continuous at the levels.
    """
    diagonal, beside = hessian_bands(magnitudes, distribution, symmetric)
    moving = slice(0 if symmetric else 1, diagonal.size - 1)
    full = np.diag(diagonal) - np.diag(beside, 1) - np.diag(beside, -1)
    return full[moving, moving]


def convexity_margin(low: ArrayLike, high: ArrayLike, distribution: Distribution) -> NDArray:
    """Return the Hessian's determinant for two levels a <= b between 0 and 1 (Prop. 1).

    The determinant is b (1 - a) p(a) p(b) - (F(b) - F(a))^2 (Eq. 20), in the shape of the
    arguments. The diagonal is never negative. Therefore Psi of [0, a, b, 1] is convex near (a, b)
    if the determinant is positive, and not convex if it is negative: one such pair proves Theorem 1
    for that law. ValueError is raised unless 0 <= low <= high <= 1.
    """
    a, b = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    if not (np.all(a >= 0) and np.all(a <= b) and np.all(b <= 1)):
        raise ValueError("low, high: must satisfy 0 <= low <= high <= 1")
    between = distribution.cdf(b) - distribution.cdf(a)
    return b * (1 - a) * distribution.pdf(a) * distribution.pdf(b) - between**2


def least_convex_pair(
    distribution: Distribution, points: ArrayLike | None = None
) -> tuple[float, float, float]:
    """Return (a, b, margin) of the least ``convexity_margin`` among all pairs a < b of ``points``.

    A negative margin proves nonconvexity. A positive margin does not prove convexity. ``points``
    (n,) are at least two different numbers within [0, 1], or else ValueError is raised. By default
    they are 256 points from 1e-6 up, equally spaced in the logarithm, and 256 equally spaced
    points, without 0 and 1.
    """
    if points is None:
        points = np.concatenate([np.geomspace(1e-6, 1, 257)[:-1], np.linspace(0, 1, 258)[1:-1]])
    points = np.unique(np.asarray(points, dtype=np.float64))
    if points.size < 2:
        raise ValueError(f"points: must contain at least two different numbers, not {points.size}")
    first, second = np.triu_indices(points.size, k=1)
    margin = convexity_margin(points[first], points[second], distribution)
    least = int(np.argmin(margin))
    return float(points[first[least]]), float(points[second[least]]), float(margin[least])


def best_single_level(distribution: Distribution) -> float:
    """Return b* of the table [0, b, 1]: F^-1(1 - E[R]), ALQ Corollary 2 (Eq. 4 at a = 0, c = 1)."""
    return float(distribution.ppf(1 - distribution.moments(1.0)[1]))


def variance_gap(distribution: Distribution, dimension: int, level: float = 0.5) -> float:
    """Return the exact excess variance of [0, level, 1] over [0, b*, 1], in units of ||v||^2.

    The result is d (Psi([0, level, 1]) - Psi([0, b*, 1])). Level 1/2 is optimal in the worst case
    (Prop. 7).
    """
    level = check_positive("level", level, below=1.0)
    best = np.clip(best_single_level(distribution), 1e-300, np.nextafter(1.0, 0.0))
    costs = [expected_variance([0.0, b, 1.0], distribution, False) for b in (level, best)]
    return check_count("dimension", dimension) * float(costs[0] - costs[1])


def variance_gap_bound(distribution: Distribution, dimension: int, level: float = 0.5) -> float:
    """Return Prop. 7's lower bound of ``variance_gap``: d gamma (b* - level)^2 / 2.

    gamma = min(p(b*), p(level)) is the least second derivative of Psi in b between the two levels.
    Therefore the bound holds for densities without a dip between them: truncated normals, as in the
    paper, and every unimodal density. Other laws may have a smaller gap.
    """
    level = check_positive("level", level, below=1.0)
    best = best_single_level(distribution)
    gamma = min(float(distribution.pdf(best)), float(distribution.pdf(level)))
    return check_count("dimension", dimension) * gamma * (best - level) ** 2 / 2
