"""Fit a table to a distribution: descend from every start and return the best result (ALQ section
3.1, App. B.3.2, C.1), or from some multipliers of exponentially spaced levels (AMQ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.magnitudes import (
    LEAST_LEVEL,
    MIN_RATIO,
    check_magnitudes,
    exponential_magnitudes,
    separated,
    uniform_magnitudes,
)
from hvd_adaptive.levels.objective import curvature_bound, expected_variance, gradient
from hvd_adaptive.levels.optimal import grid_optimum

# Largest move, as a share of the distance to the nearest neighbour. At the paper's 1/2, two
# neighbours that move towards each other would collide.
_SHARE = 0.49
# The least level, p**s, stays a normal float32, and so does its gap times 2**-24.
_LEAST = 2.0**-96
_LARGEST = 1 - 2.0**-12
# Distance of the starts in log(p / (1 - p)); number of best starts that descend; most steps each.
_SPACING, _DESCENTS, _STEPS = 0.025, 4, 200


@dataclass(frozen=True)
class Descent:
    """Result of a solver."""

    magnitudes: Array  # (..., K), in the shape of the start
    history: Array  # (sweeps + 1, ...), the objective before the first sweep and after each sweep
    converged: Array  # (...), whether the last sweep gained less than the tolerance


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

    A law other than a Histogram is tabulated first. The descent ends after ``max_sweeps``, or when
    every row improves by less than ``tolerance``, a share of its objective.
    """
    # The sub-problems are convex: the clipped optimum is the optimum among the separated positions.
    levels = separated(check_magnitudes(magnitudes, symmetric), symmetric)
    law = distribution.tabulate()
    history = [np.asarray(expected_variance(levels, law, symmetric))]
    converged = np.zeros(levels.shape[:-1], dtype=bool)
    while len(history) <= max_sweeps and not converged.all():
        if symmetric and levels.shape[-1] > 1:
            _place(levels, 0, law.balance_point(levels[..., 1])[..., None])
        for parity in (2, 1):
            low, high = levels[..., parity - 1 : -2 : 2], levels[..., parity + 1 :: 2]
            if low.size:
                _place(levels, parity, best_level(low, high, law))
        history.append(np.asarray(expected_variance(levels, law, symmetric)))
        converged = history[-2] - history[-1] <= tolerance * history[-2]
    return Descent(levels, np.array(history), converged)


def _place(levels: Array, start: int, wanted: Array) -> None:
    """Set levels start, start + 2, ... to ``wanted``, clipped between their neighbours."""
    target = levels[..., start:-1:2] if start else levels[..., :1]
    below = levels[..., start - 1 : -2 : 2] if start else np.zeros_like(target)
    above = levels[..., start + 1 :: 2] if start else levels[..., 1:2]
    least = np.maximum(below * MIN_RATIO, LEAST_LEVEL)
    most = above / MIN_RATIO
    target[...] = np.where(least <= most, np.clip(wanted, least, np.maximum(least, most)), target)


def gradient_descent(
    magnitudes: ArrayLike,
    distribution: Distribution,
    symmetric: bool,
    tolerance: float = 1e-5,
    max_sweeps: int = 400,
) -> Descent:
    """Minimise Psi from each row of magnitudes (..., K) by ALQ Eq. 7.

    Each level moves against its derivative by at most (just under) half the distance to its nearest
    neighbour. So the levels never cross, and no projection is needed.

    The step size of a level is eta = 1 / ``curvature_bound``. A common eta, as printed, is not
    usable: curvatures differ by many orders of magnitude between the bulk and the tail. This Jacobi
    step cannot overshoot a quadratic. Backtracking covers other objectives: a row whose objective
    would rise keeps its levels and halves its steps, and doubles them again after a success.

    The arguments and the result are those of ``coordinate_descent``.
    """
    levels = separated(check_magnitudes(magnitudes, symmetric), symmetric)
    history = [np.asarray(expected_variance(levels, distribution, symmetric))]
    scale = np.ones(levels.shape[:-1])
    converged = np.zeros(levels.shape[:-1], dtype=bool)
    while len(history) <= max_sweeps and not converged.all():
        slope = gradient(levels, distribution, symmetric)
        bound = curvature_bound(levels, distribution, symmetric)
        step = np.divide(slope, bound, out=np.zeros_like(slope), where=bound > 0)
        gaps = np.diff(levels, prepend=-levels[..., :1] if symmetric else -1.0, append=np.inf)
        limit = _SHARE * np.minimum(gaps[..., :-1], gaps[..., 1:])
        step = np.clip(scale[..., None] * step, -limit, limit)
        moved = separated(levels - step, symmetric)
        value = np.asarray(expected_variance(moved, distribution, symmetric))
        better = value <= history[-1]
        levels = np.where(better[..., None], moved, levels)
        history.append(np.where(better, value, history[-1]))
        gain = history[-2] - history[-1]
        small = better & (scale >= 1) & (gain <= tolerance * history[-2])
        # A row that finds no better point even with tiny steps is at its minimum, up to rounding.
        converged = small | (scale < 1e-6)
        scale = np.where(better, np.minimum(2 * scale, 1.0), scale / 2)
    return Descent(levels, np.array(history), converged)


def exponential(distribution: Distribution | None, count: int, symmetric: bool) -> Array:
    """Return 1, p, p**2, ... with p = 0.5 (NUQSGD); p is larger if the least would pass 2**-32."""
    return exponential_magnitudes(count, 0.5 ** min(1.0, 32 / (count - 1)), symmetric)


def quantile(distribution: Distribution, count: int, symmetric: bool) -> Array:
    """Return equal steps of the mass away from zero."""
    zeros, steps = distribution.cdf(np.zeros(1)), uniform_magnitudes(count, symmetric)
    return separated(distribution.ppf(zeros + (1 - zeros) * steps), symmetric)


def cube_root(distribution: Distribution, count: int, symmetric: bool) -> Array:
    """Return equal steps of the integral of density**(1/3).

    This is the limit of the best table for many levels: an interval of width h costs p h**3 / 6, so
    the spacing with the least sum is proportional to p**(-1/3). From other starts, coordinate
    descent needs many sweeps to find it at 7 and 8 bits.
    """
    histogram, steps = distribution.tabulate(), uniform_magnitudes(count, symmetric)
    if not histogram.masses.any():
        return steps
    return separated(histogram.cube_root_points(steps), symmetric)


def dynamic_programme(distribution: Distribution, count: int, symmetric: bool) -> Array:
    """Return the optimum on a grid of candidates, near the global one for any shape: without this
    start, heavy tails and scale mixtures end in local minima (tests/unit/levels).
    """
    levels = grid_optimum(distribution, count, symmetric, grid=max(256, 8 * count))
    return separated(levels, symmetric)


STARTS: dict[str, Callable[[Distribution, int, bool], Array]] = {
    "uniform": lambda distribution, count, symmetric: uniform_magnitudes(count, symmetric),
    "exponential": exponential,
    "quantile": quantile,
    "cube_root": cube_root,
    "dynamic_programme": dynamic_programme,
}

SOLVERS: dict[str, Callable[[Array, Distribution, bool], Descent]] = {
    "coordinate_descent": coordinate_descent,
    "gradient_descent": gradient_descent,
}


@dataclass(frozen=True)
class FitResult:
    """Fitted table, and its expected variance per coordinate on the tabulated distribution, in
    units of the squared norm.
    """

    magnitudes: Array  # (2**(bits-1),) float64, strictly increasing to 1 in float32 too
    objective: float


def fit_levels(
    distribution: Distribution,
    bits: int,
    symmetric: bool,
    solver: str = "coordinate_descent",
    extra_starts: Iterable[ArrayLike] = (),
) -> FitResult:
    """Return the table of 2**(bits-1) magnitudes with the least expected variance (ALQ Eqs 3, 10);
    raise ValueError if all mass lies at zero.

    A law other than a Histogram is tabulated first. All starts descend together, as rows of one
    array: ``STARTS`` and ``extra_starts``, such as the current table. ``bits`` is 2 to 8, and
    ``solver`` one of ``SOLVERS``.
    """
    count = 1 << (bits - 1)
    distribution = distribution.tabulate()
    if distribution.zero_mass >= 1:
        raise ValueError("distribution: all mass lies at zero, no level is better than another")
    starts = [start(distribution, count, symmetric) for start in STARTS.values()]
    descent = SOLVERS[solver](np.stack([*extra_starts, *starts]), distribution, symmetric)
    best = int(np.argmin(descent.history[-1]))
    return FitResult(descent.magnitudes[best], float(descent.history[-1][best]))


def multiplier_gradient(
    multiplier: float, distribution: Distribution, count: int, symmetric: bool = True
) -> float:
    """Return dPsi/dp (ALQ Eqs 8, 38, App. C.3) in folded form.

    By the chain rule over the levels l_j = p**j, this is sum_j (dPsi/dl_j) j p**(j-1) with
    dPsi/dl_j of Eq. 30, or of Eq. 6 if the table is zero-based. The level 0 depends on no p. The
    least power l_s has no term 2 l_s F(l_s) then: coordinates in [0, l_s] are rounded to 0 or l_s
    at the cost r (l_s - r), whose derivative is r. The printed Eq. 8 is this sum written out (half
    of it, for an even density). App. C.3 prints half of Eq. 38's derivative.
    """
    powers = np.arange(count - 1, -1, -1.0)
    slopes = powers * np.power(multiplier, np.maximum(powers - 1, 0))
    magnitudes = exponential_magnitudes(count, multiplier, symmetric)
    return float(gradient(magnitudes, distribution, symmetric) @ slopes)


def fit_multiplier(
    distribution: Distribution, count: int, symmetric: bool = True, start: float = 0.5
) -> FitResult:
    """Return the table ..., p**2, p, 1 with the least expected variance (ALQ section 3.3, App.
    B.3.3).

    Psi(p) has several minima. Therefore descent runs from the best few of a grid of starts, which
    includes ``start``, and the best result is returned. Steps go against the sign of the derivative
    in log(p / (1 - p)), which keeps p inside (0, 1). They grow while the objective falls and are
    halved if it would rise.

    The zero-based table of ``count`` 2, the levels 0 and 1, depends on no multiplier.
    """
    law = distribution.tabulate()
    powers = count - 1 if symmetric else count - 2
    if powers == 0:
        levels = np.array([0.0, 1.0])
        return FitResult(levels, float(expected_variance(levels, law, False)))
    least = max(_LEAST ** (1 / powers), 1e-4)
    rungs = np.arange(_logit(least), _logit(_LARGEST), _SPACING)
    starts = np.clip(np.append(1 / (1 + np.exp(-rungs)), start), least, _LARGEST)
    tables = np.stack([exponential_magnitudes(count, p, symmetric) for p in starts])
    ladder = starts[np.argsort(expected_variance(tables, law, symmetric))][:_DESCENTS]
    value, best = min(_descend(float(p), law, count, symmetric, least) for p in ladder)
    return FitResult(exponential_magnitudes(count, best, symmetric), value)


def _descend(
    p: float, law: Distribution, count: int, symmetric: bool, least: float
) -> tuple[float, float]:
    """Return Psi(p) and p at the end of a descent from p."""

    def objective(p: float) -> float:
        return float(expected_variance(exponential_magnitudes(count, p, symmetric), law, symmetric))

    value, size = objective(p), _SPACING
    for _ in range(_STEPS):
        if size <= 1e-6:
            break
        slope = multiplier_gradient(p, law, count, symmetric)
        odds = p / (1 - p) * np.exp(-np.sign(slope) * size)
        moved = float(np.clip(odds / (1 + odds), least, _LARGEST))
        lower = objective(moved)
        if lower < value:
            p, value, size = moved, lower, 1.2 * size
        else:
            size /= 2
    return value, p


def _logit(p: float) -> float:
    return float(np.log(p / (1 - p)))
