"""Brute force over one bucket's sorted coordinates, float64: what the ORQ paper's conditions say.

Nothing here imports the package.
"""

from __future__ import annotations

import numpy as np


def rounding_variance(values: np.ndarray, levels: np.ndarray) -> float:
    """Eq. 9: sum of (v - b_k-1)(b_k - v) for v within the levels."""
    lower, upper = surrounding(values, levels)
    return float(((values - lower) * (upper - values)).sum())


def surrounding(values: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The levels below and above; both are the level itself where a value lies on one."""
    above = np.clip(np.searchsorted(levels, values, side="left"), 0, len(levels) - 1)
    below = np.clip(np.searchsorted(levels, values, side="right") - 1, 0, len(levels) - 1)
    return levels[below], levels[above]


def best_levels(values: np.ndarray, count: int) -> float:
    """Least variance of ``count`` levels that are coordinates, by dynamic programme.

    The variance is linear in each level between coordinates, so no others can be better.
    """
    points = np.unique(values)
    cost = np.full((len(points), len(points)), np.inf)
    for i, a in enumerate(points):
        for j in range(i, len(points)):
            inside = values[(values >= a) & (values <= points[j])]
            cost[i, j] = ((inside - a) * (points[j] - inside)).sum()
    best = cost[0]
    for _ in range(count - 2):
        best = (best[:, None] + cost).min(axis=0)
    return float(best[-1])


def two_sides(values: np.ndarray, cut: float) -> tuple[float, float]:
    """Means below the cut and from it on."""
    return float(values[values < cut].mean()), float(values[values >= cut].mean())
