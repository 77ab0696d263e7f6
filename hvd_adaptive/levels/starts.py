"""Provide starts for the descents, since Psi is not convex (ALQ paper, Theorem 1, Fig. 8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.histogram import tabulated
from hvd_adaptive.levels.magnitudes import (
    exponential_magnitudes,
    separated,
    uniform_magnitudes,
)
from hvd_adaptive.levels.optimal import grid_optimum

Start = Callable[[Distribution, int, bool], Array]


def uniform(distribution: Distribution, count: int, symmetric: bool) -> Array:
    """Return equal steps over [-1, 1] (QSGD; symmetric: the ALQ paper's QSGDinf)."""
    return uniform_magnitudes(count, symmetric)


def exponential(distribution: Distribution | None, count: int, symmetric: bool) -> Array:
    """Return 1, p, p**2, ... with p = 0.5 (NUQSGD); p is larger if the least would pass 2**-32."""
    return exponential_magnitudes(count, 0.5 ** min(1.0, 32 / (count - 1)), symmetric)


def quantile(distribution: Distribution, count: int, symmetric: bool) -> Array:
    """Return equal steps of the mass away from zero."""
    zeros = distribution.cdf(np.zeros(1))
    return separated(
        distribution.ppf(zeros + (1 - zeros) * uniform_magnitudes(count, symmetric)), symmetric
    )


def cube_root(distribution: Distribution, count: int, symmetric: bool) -> Array:
    """Return equal steps of the integral of density**(1/3).

    This is the limit of the best table for many levels: an interval of width h costs p h**3 / 6, so
    the spacing with the least sum is proportional to p**(-1/3). From other starts, coordinate
    descent needs many sweeps to find it at 7 and 8 bits.
    """
    histogram = tabulated(distribution)
    roots = np.cumsum(np.cbrt(histogram.density) * np.diff(histogram.edges))
    if roots[-1] == 0:
        return uniform(distribution, count, symmetric)
    share = np.concatenate([[0.0], roots / roots[-1]])
    return separated(
        np.interp(uniform_magnitudes(count, symmetric), share, histogram.edges), symmetric
    )


def dynamic_programme(distribution: Distribution, count: int, symmetric: bool) -> Array:
    """Return the optimum on a grid of candidates, which is near the global one for any shape.

    Without this start, heavy tails and scale mixtures end in local minima: see tests/unit/levels.
    """
    levels = grid_optimum(distribution, count, symmetric, grid=max(256, 8 * count))
    return separated(levels, symmetric)


STARTS: dict[str, Start] = {
    "uniform": uniform,
    "exponential": exponential,
    "quantile": quantile,
    "cube_root": cube_root,
    "dynamic_programme": dynamic_programme,
}
