"""Coordinate descent on the levels (ALQ paper, section 3.1, App. B.3.2, C.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.histogram import Histogram
from hvd_adaptive.levels.magnitudes import LEAST_LEVEL, MIN_RATIO, check_magnitudes, separated
from hvd_adaptive.levels.objective import expected_variance


@dataclass(frozen=True)
class Descent:
    """What a solver returns.

    magnitudes: (..., K), as started. history: (sweeps + 1, ...), the objective before the first
    sweep and after each. converged: (...), whether the last sweep improved less than the tolerance.
    """

    magnitudes: Array
    history: Array
    converged: Array

    @property
    def sweeps(self) -> int:
        return len(self.history) - 1


def best_level(low: ArrayLike, high: ArrayLike, distribution: Distribution) -> Array:
    """The level between low and high that minimises Psi: beta of Eq. 4 (24, 33; 34 for normals).

    low, high: one shape, low < high. F^-1(F(c) - int_(a,c] (r - a)/(c - a) dF) in folded form.
    Where (low, high] has no mass any point would do: the middle is returned.
    """
    low, high = np.asarray(low, float), np.asarray(high, float)
    mass, mean, _ = distribution.moments(np.stack([low, high]))
    share = ((mean[1] - mean[0]) - low * (mass[1] - mass[0])) / (high - low)
    best = distribution.ppf(np.clip(mass[1] - share, mass[0], mass[1]))
    return np.where(mass[1] > mass[0], best, (low + high) / 2)


@singledispatch
def first_level(distribution: Distribution, high: ArrayLike) -> Array:
    """The l1 in [0, high] of a symmetric table, given l2 = high: Eq. 31 (35 for normals), by
    bisection as the paper asks, in closed form for a Histogram.

    Folded it reads 2 b F(b) = int_(b,c] (c - r) dF. The paper's F(b) - F(0) is twice smaller (the
    positive half of an even law) and leaves out an atom at zero, which weighs in l1^2 F(l1).
    """
    high = np.asarray(high, dtype=np.float64)
    mass, mean, _ = distribution.moments(high)
    low, upper = np.zeros_like(high), high
    for _ in range(60):
        middle = (low + upper) / 2
        at, mean_at, _ = distribution.moments(middle)
        above = 2 * middle * at >= high * (mass - at) - (mean - mean_at)
        low, upper = np.where(above, low, middle), np.where(above, middle, upper)
    return (low + upper) / 2


@first_level.register
def _(distribution: Histogram, high: ArrayLike) -> Array:
    return distribution.balance_point(high)


def coordinate_descent(
    magnitudes: ArrayLike,
    distribution: Distribution,
    symmetric: bool,
    tolerance: float = 1e-5,
    max_sweeps: int = 100,
) -> Descent:
    """Minimise Psi one level at a time (Eq. 5) from each row of magnitudes (..., K).

    A sweep updates first the levels of one parity, then those of the other. This is coordinate
    descent: Psi couples a level to its two neighbours only (its Hessian is tridiagonal), so with
    the even levels fixed the odd ones' optima do not depend on each other, and updating them at
    once equals updating them in turn. Each sub-problem is convex (Prop. 2 and 5), so Psi never
    increases. Levels stop at ``MIN_RATIO`` from their neighbours. Ends when every row improves by
    less than ``tolerance`` relatively, or after ``max_sweeps``.
    """
    # Convex sub-problems: the clipped optimum is the optimum among the separated positions.
    levels = separated(check_magnitudes(magnitudes, symmetric), symmetric)
    history = [np.asarray(expected_variance(levels, distribution, symmetric))]
    converged = np.zeros(levels.shape[:-1], dtype=bool)
    while len(history) <= max_sweeps and not converged.all():
        if symmetric and levels.shape[-1] > 1:
            _place(levels, 0, first_level(distribution, levels[..., 1])[..., None], symmetric)
        for parity in (2, 1):
            low, high = levels[..., parity - 1 : -2 : 2], levels[..., parity + 1 :: 2]
            if low.size:
                _place(levels, parity, best_level(low, high, distribution), symmetric)
        history.append(np.asarray(expected_variance(levels, distribution, symmetric)))
        converged = history[-2] - history[-1] <= tolerance * history[-2]
    return Descent(levels, np.array(history), converged)


def _place(levels: Array, start: int, wanted: Array, symmetric: bool) -> None:
    """Set levels start, start + 2, ... within what their neighbours allow."""
    target = levels[..., start:-1:2] if start else levels[..., :1]
    below = levels[..., start - 1 : -2 : 2] if start else np.zeros_like(target)
    above = levels[..., start + 1 :: 2] if start else levels[..., 1:2]
    least = np.maximum(below * MIN_RATIO, LEAST_LEVEL)
    most = above / MIN_RATIO
    target[...] = np.where(least <= most, np.clip(wanted, least, np.maximum(least, most)), target)
