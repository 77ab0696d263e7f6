"""Minimise the expected variance one level at a time (ALQ section 3.1, App. B.3.2, C.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.magnitudes import LEAST_LEVEL, MIN_RATIO, check_magnitudes, separated
from hvd_adaptive.levels.objective import expected_variance


@dataclass(frozen=True)
class Descent:
    """Result of a solver.

    Attributes:
        magnitudes: (..., K), in the shape of the start.
        history: (sweeps + 1, ...), the objective before the first sweep and after each sweep.
        converged: (...), whether the last sweep improved the objective by less than the tolerance.
    """

    magnitudes: Array
    history: Array
    converged: Array


def best_level(low: ArrayLike, high: ArrayLike, distribution: Distribution) -> Array:
    """Return the level between ``low`` and ``high`` that minimises Psi: beta of ALQ Eq. 4.

    This is F^-1(F(c) - int_(a,c] (r - a)/(c - a) dF) in folded form (also Eqs 24, 33; Eq. 34 for
    normals). If (low, high] has no mass, every point is optimal and the middle is returned. The
    neighbours a = ``low`` and c = ``high`` > a have the same shape.
    """
    low, high = np.asarray(low, float), np.asarray(high, float)
    mass, mean, _ = distribution.moments(np.stack([low, high]))
    share = ((mean[1] - mean[0]) - low * (mass[1] - mass[0])) / (high - low)
    best = distribution.ppf(np.clip(mass[1] - share, mass[0], mass[1]))
    return np.where(mass[1] > mass[0], best, (low + high) / 2)


def coordinate_descent(
    magnitudes: ArrayLike,
    distribution: Distribution,
    symmetric: bool,
    tolerance: float = 1e-5,
    max_sweeps: int = 100,
) -> Descent:
    """Minimise Psi one level at a time (Eq. 5) from each row of magnitudes (..., K).

    A sweep updates the levels of one parity first, then those of the other. This equals coordinate
    descent: Psi couples a level to its two neighbours only (its Hessian is tridiagonal). Given the
    even levels, the optima of the odd levels do not depend on each other, so updating them together
    equals updating them in turn. Each sub-problem is convex (Prop. 2 and 5), so Psi never
    increases. Levels keep the ratio ``MIN_RATIO`` to their neighbours.

    Args:
        magnitudes: (..., K), starting tables.
        distribution: Law that the tables are fitted to, tabulated first if it is no Histogram.
        symmetric: Whether the tables are symmetric.
        tolerance: Stop when every row improves by less than this share of its objective.
        max_sweeps: Stop after this many sweeps.
    """
    # The sub-problems are convex: the clipped optimum is the optimum among the separated positions.
    levels = separated(check_magnitudes(magnitudes, symmetric), symmetric)
    law = distribution.tabulate()
    history = [np.asarray(expected_variance(levels, law, symmetric))]
    converged = np.zeros(levels.shape[:-1], dtype=bool)
    while len(history) <= max_sweeps and not converged.all():
        if symmetric and levels.shape[-1] > 1:
            _place(levels, 0, law.balance_point(levels[..., 1])[..., None], symmetric)
        for parity in (2, 1):
            low, high = levels[..., parity - 1 : -2 : 2], levels[..., parity + 1 :: 2]
            if low.size:
                _place(levels, parity, best_level(low, high, law), symmetric)
        history.append(np.asarray(expected_variance(levels, law, symmetric)))
        converged = history[-2] - history[-1] <= tolerance * history[-2]
    return Descent(levels, np.array(history), converged)


def _place(levels: Array, start: int, wanted: Array, symmetric: bool) -> None:
    """Set levels start, start + 2, ... to ``wanted``, clipped between their neighbours."""
    target = levels[..., start:-1:2] if start else levels[..., :1]
    below = levels[..., start - 1 : -2 : 2] if start else np.zeros_like(target)
    above = levels[..., start + 1 :: 2] if start else levels[..., 1:2]
    least = np.maximum(below * MIN_RATIO, LEAST_LEVEL)
    most = above / MIN_RATIO
    target[...] = np.where(least <= most, np.clip(wanted, least, np.maximum(least, most)), target)
