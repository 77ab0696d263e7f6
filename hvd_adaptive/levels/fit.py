"""Fit a table to a distribution: descend from every start and return the best result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.coordinate_descent import Descent, coordinate_descent
from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.gradient_descent import gradient_descent
from hvd_adaptive.levels.histogram import tabulated
from hvd_adaptive.levels.magnitudes import check_magnitudes, magnitude_count
from hvd_adaptive.levels.starts import STARTS

Solver = Callable[[Array, Distribution, bool], Descent]
SOLVERS: dict[str, Solver] = {
    "coordinate_descent": coordinate_descent,
    "gradient_descent": gradient_descent,
}


class FitError(ValueError):
    """The distribution does not determine any levels."""


@dataclass(frozen=True)
class FitResult:
    """Fitted table.

    Attributes:
        magnitudes: (2**(bits-1),) float64, strictly increasing in float32 too; the last one is 1.
        objective: Expected variance per coordinate on the tabulated distribution, in units of the
            squared norm.
        start_name: Name of the start that led to the table.
        sweeps: Sweeps of the solver.
    """

    magnitudes: Array
    objective: float
    start_name: str
    sweeps: int


def fit_levels(
    distribution: Distribution,
    bits: int,
    symmetric: bool,
    solver: str = "coordinate_descent",
    extra_starts: Iterable[ArrayLike] = (),
) -> FitResult:
    """Return the table of 2**(bits-1) magnitudes with the least expected variance (ALQ Eqs 3, 10).

    All starts descend together, as rows of one array.

    Args:
        distribution: Law of the folded coordinates. A law other than a Histogram is tabulated
            first.
        bits: 2..8, including the sign.
        symmetric: Whether the table is symmetric.
        solver: "coordinate_descent" or "gradient_descent".
        extra_starts: Magnitudes to start from besides ``STARTS``, such as the current table.

    Raises:
        FitError: All mass lies at zero.
        ValueError: A keyword is wrong.
    """
    count = magnitude_count(bits)
    if solver not in SOLVERS:
        raise ValueError(f"solver: must be one of {', '.join(SOLVERS)}, not {solver!r}")
    named = {f"extra_{n}": check_magnitudes(e, symmetric) for n, e in enumerate(extra_starts)}
    for name, levels in named.items():
        if levels.shape != (count,):
            raise ValueError(f"extra_starts: {name} must have {count} levels, not {levels.shape}")
    distribution = tabulated(distribution)
    if distribution.zero_mass >= 1:
        raise FitError("distribution: all mass lies at zero, no level is better than another")
    for name, start in STARTS.items():
        named[name] = start(distribution, count, symmetric)
    descent = SOLVERS[solver](np.stack(list(named.values())), distribution, symmetric)
    best = int(np.argmin(descent.history[-1]))
    return FitResult(
        descent.magnitudes[best],
        float(descent.history[-1][best]),
        list(named)[best],
        descent.sweeps,
    )
