"""Define, check and separate the magnitudes of level tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array

# The least ratio of neighbours, and the least positive level. With both, the levels still increase
# strictly after rounding to float32.
MIN_RATIO = 1 + 2.0**-20
LEAST_LEVEL = 2.0**-40


def check_magnitudes(magnitudes: ArrayLike, symmetric: bool, name: str = "magnitudes") -> Array:
    """Return the magnitudes as float64 (..., K); raise ValueError unless each row increases
    strictly to exactly 1, from a positive one if ``symmetric`` (ALQ App. B.3), and from 0 otherwise
    (section 3). ``name`` is that of the argument in the message.
    """
    levels = np.asarray(magnitudes, dtype=np.float64)
    if levels.ndim == 0 or levels.shape[-1] < (1 if symmetric else 2):
        raise ValueError(f"{name}: too few levels, shape {levels.shape}")
    if not (np.all(np.diff(levels) > 0) and np.all(levels[..., -1] == 1)):
        raise ValueError(f"{name}: must increase strictly up to 1, not {levels.tolist()}")
    first = levels[..., 0]
    if not np.all(first > 0 if symmetric else first == 0):
        wanted = "positive" if symmetric else "zero"
        raise ValueError(
            f"{name}: the first must be {wanted} if symmetric={symmetric}, not {first.tolist()}"
        )
    return levels


def uniform_magnitudes(count: int, symmetric: bool) -> Array:
    """Return magnitudes with equal signed steps: 0, 1/s, ..., 1, or 1/(2K-1), 3/(2K-1), ..., 1."""
    if symmetric:
        return (2 * np.arange(count) + 1) / (2 * count - 1)
    return np.arange(count) / (count - 1)


def exponential_magnitudes(count: int, multiplier: float, symmetric: bool) -> Array:
    """Return ..., p**2, p, 1 (ALQ section 3.3); the least one is 0 unless symmetric (NUQSGD).

    Products have the same digits on all processors, and powers need not.
    """
    factors = np.full(count, float(multiplier))
    factors[0] = 1.0
    levels = np.multiply.accumulate(factors)[::-1].copy()
    if not symmetric:
        levels[0] = 0.0
    return levels


def signed_levels(magnitudes: ArrayLike, symmetric: bool) -> Array:
    """Return the ascending signed levels: 2K if symmetric, else 2K - 1 with one zero."""
    levels = check_magnitudes(magnitudes, symmetric)
    return np.concatenate([-levels[::-1], levels if symmetric else levels[1:]])


def separated(levels: ArrayLike, symmetric: bool) -> Array:
    """Return a table close to ``levels``, (..., K), non-decreasing within [0, 1], that satisfies
    ``MIN_RATIO`` and ``LEAST_LEVEL``. The last level becomes 1, and the first one of a zero-based
    table 0.
    """
    levels = np.array(levels, dtype=np.float64)
    first = 0 if symmetric else 1
    positive = levels[..., first:]
    steps = np.arange(positive.shape[-1]) * np.log(MIN_RATIO)
    logs = np.log(np.clip(positive, LEAST_LEVEL, 1.0)) - steps
    logs = np.maximum.accumulate(logs, axis=-1) + steps
    # The upward pass may exceed 1: move levels down from there.
    logs[..., -1] = 0.0
    logs -= steps
    logs = np.minimum.accumulate(logs[..., ::-1], axis=-1)[..., ::-1] + steps
    # Levels that were far enough apart keep their exact value.
    apart = np.exp(logs)
    levels[..., first:] = np.where(np.abs(apart - positive) > 2.0**-45 * apart, apart, positive)
    levels[..., -1] = 1.0
    levels[..., :first] = 0.0
    return levels
