"""Compute the levels of least squared error for N(0, 1) (Lloyd 1982, Max 1960)."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np

_NEWTON_STEPS = 50
_TOLERANCE = 1e-14


@functools.cache
def normal_levels(bits: int) -> np.ndarray:
    """Return the 2**bits levels, ascending, float64, read-only.

    Each threshold is the mean of its two levels, and each level is the mean of N(0, 1) between its
    thresholds. Newton's method solves these equations for the positive half; its Jacobian is
    tridiagonal. It starts at quantiles of N(0, 3), the law of levels at high rates (Panter and
    Dite 1951).
    """
    half, law = 1 << (bits - 1), NormalDist(0, math.sqrt(3))
    positive = np.array([law.inv_cdf(0.5 + (j + 0.5) / (2 * half)) for j in range(half)])
    for _ in range(_NEWTON_STEPS):
        step = _newton_step(positive)
        positive -= step
        if np.abs(step).max() < _TOLERANCE:
            break
    levels = np.concatenate([-positive[::-1], positive])
    levels.flags.writeable = False
    return levels


def distortion(levels: np.ndarray) -> float:
    """Return E(q(z) - z)² for z ~ N(0, 1) and the nearest of ``normal_levels``, q(z): 1 - E q(z)²,
    as each level is its cell's mean.
    """
    positive = levels[levels > 0]
    return 1 - 2 * float(positive**2 @ _masses(_edges(positive)))


def _newton_step(levels: np.ndarray) -> np.ndarray:
    """Return J⁻¹ F for F_j = l_j - c_j, c_j being the mean of cell j."""
    edges = _edges(levels)
    lower, upper, mass = edges[:-1], edges[1:], _masses(edges)
    at_lower, at_upper = (np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) for x in (lower, upper))
    mean = (at_lower - at_upper) / mass
    by_lower = at_lower * (mean - lower) / mass
    by_upper = np.zeros_like(mass)
    by_upper[:-1] = at_upper[:-1] * (upper[:-1] - mean[:-1]) / mass[:-1]
    by_lower[0] = 0.0  # zero is a fixed threshold
    jacobian = np.diag(1 - (by_lower + by_upper) / 2)
    jacobian -= np.diag(by_upper[:-1] / 2, 1) + np.diag(by_lower[1:] / 2, -1)
    return np.linalg.solve(jacobian, levels - mean)


def _edges(positive: np.ndarray) -> np.ndarray:
    """Return the ends of the cells of the positive levels."""
    return np.concatenate([[0.0], (positive[1:] + positive[:-1]) / 2, [np.inf]])


def _masses(edges: np.ndarray) -> np.ndarray:
    return -np.diff([math.erfc(edge / math.sqrt(2)) / 2 for edge in edges])
