"""What a table's magnitudes may be, and how they stay apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array

BITS = range(2, 9)
# Neighbours differ by this ratio at least, and the least positive level is no smaller than
# LEAST_LEVEL: rounded to float32 the levels still increase strictly.
MIN_RATIO = 1 + 2.0**-20
LEAST_LEVEL = 2.0**-40


def magnitude_count(bits: int) -> int:
    """2**(bits-1): one bit of the code is the sign. bits outside 2..8: ValueError."""
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits: must be an integer from {BITS[0]} to {BITS[-1]}, not {bits!r}")
    return 1 << (int(bits) - 1)


def check_magnitudes(magnitudes: ArrayLike, symmetric: bool) -> Array:
    """The magnitudes as float64 (..., K), each row ascending to exactly 1; else ValueError.

    symmetric: the first is positive (App. B.3); otherwise it is 0 (section 3).
    """
    levels = np.asarray(magnitudes, dtype=np.float64)
    if levels.ndim == 0 or levels.shape[-1] < (1 if symmetric else 2):
        raise ValueError(f"magnitudes: too few levels, shape {levels.shape}")
    if not (np.all(np.diff(levels) > 0) and np.all(levels[..., -1] == 1)):
        raise ValueError(f"magnitudes: must increase strictly up to 1, not {levels.tolist()}")
    first = levels[..., 0]
    if not np.all(first > 0 if symmetric else first == 0):
        wanted = "positive" if symmetric else "zero"
        raise ValueError(
            f"magnitudes: the first must be {wanted} where symmetric={symmetric}, "
            f"not {first.tolist()}"
        )
    return levels


def uniform_magnitudes(count: int, symmetric: bool) -> Array:
    """Equal steps of the signed table: 0, 1/s, ..., 1, or 1/(2K-1), 3/(2K-1), ..., 1."""
    if symmetric:
        return (2 * np.arange(count) + 1) / (2 * count - 1)
    return np.arange(count) / (count - 1)


def exponential_magnitudes(count: int, multiplier: float, symmetric: bool) -> Array:
    """..., p**2, p, 1 (ALQ section 3.3), the least of them 0 unless symmetric (NUQSGD)."""
    levels = np.power(float(multiplier), np.arange(count - 1, -1, -1.0))
    if not symmetric:
        levels[0] = 0.0
    return levels


def signed_levels(magnitudes: ArrayLike, symmetric: bool) -> Array:
    """Ascending signed levels: 2K of a symmetric table, 2K - 1 (one zero) of a zero-based one."""
    levels = check_magnitudes(magnitudes, symmetric)
    return np.concatenate([-levels[::-1], levels if symmetric else levels[1:]])


def separated(levels: ArrayLike, symmetric: bool) -> Array:
    """The nearest table, more or less, whose levels keep ``MIN_RATIO`` and ``LEAST_LEVEL``.

    levels: (..., K), non-decreasing within [0, 1]; the ends are set to where they belong.
    """
    levels = np.array(levels, dtype=np.float64)
    first = 0 if symmetric else 1
    positive = levels[..., first:]
    steps = np.arange(positive.shape[-1]) * np.log(MIN_RATIO)
    logs = np.log(np.clip(positive, LEAST_LEVEL, 1.0)) - steps
    logs = np.maximum.accumulate(logs, axis=-1) + steps
    # Pushing up may have pushed past 1: push down from there.
    logs[..., -1] = 0.0
    logs -= steps
    logs = np.minimum.accumulate(logs[..., ::-1], axis=-1)[..., ::-1] + steps
    # Levels that kept their distance keep their exact value too.
    apart = np.exp(logs)
    levels[..., first:] = np.where(np.abs(apart - positive) > 2.0**-45 * apart, apart, positive)
    levels[..., -1] = 1.0
    levels[..., :first] = 0.0
    return levels
