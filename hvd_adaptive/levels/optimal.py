"""Find the best table on a grid of candidates by dynamic programming.

ZipML (reference [23] of the ALQ paper) solves the problem over all points at once. Here the result
is exact only up to the grid, and the cost is not quadratic in its size N. The cost of an interval,
C(a, c) = int_(a,c] (c - r)(r - a) dF, has d2C/da dc = -(F(c) - F(a)) <= 0, so it satisfies the
quadrangle inequality. The best predecessor then grows with the level, and each layer costs O(N log
N).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution, Histogram, Moments
from hvd_adaptive.levels.magnitudes import LEAST_LEVEL, separated

_PART = 8  # rows of a pass's finer grid in one of its coarser grid


def grid_optimum(law: Distribution, count: int, symmetric: bool, grid: int) -> Array:
    """Return the best ``count`` magnitudes: of ``candidate_grid``, which has about ``grid`` > count
    levels, then of a grid that subdivides the chosen intervals.
    """
    candidates = candidate_grid(law.tabulate(), grid)
    levels = best_on_grid(candidates, law.moments(candidates), count, symmetric)
    knots = np.concatenate([[0.0], levels]) if symmetric else levels
    parts = max(2, grid // (knots.size - 1))
    steps = np.arange((knots.size - 1) * parts + 1) / parts
    # The levels remain among the candidates, however interp rounds.
    fine = np.union1d(np.interp(steps, np.arange(knots.size), knots), levels)
    return best_on_grid(fine, law.moments(fine), count, symmetric)


def candidate_grid(histogram: Histogram, size: int) -> Array:
    """Return about ``size`` ascending candidates, including 0 and 1.

    One third is spaced by the mass, one third by the cube root of the density (where many levels
    lie), and one third geometrically over the support.
    """
    third = max(size // 3, 2)
    steps = np.linspace(0.0, 1.0, third)
    edges, masses = histogram.edges, histogram.masses
    used = np.flatnonzero(masses)
    if used.size == 0:
        return np.concatenate([[0.0], np.geomspace(LEAST_LEVEL, 1.0, size - 1)])
    by_root = histogram.cube_root_points(steps)
    by_mass = histogram.ppf(histogram.zero_mass + masses.sum() * steps)
    # Include the octave below the support: the first level may be below all samples.
    least = max(edges[used[0]] / 2, edges[used[0] + 1] / 4, LEAST_LEVEL)
    geometric = np.geomspace(least, 1.0, third)
    points = np.unique(np.concatenate([[0.0], by_root, by_mass, geometric, [1.0]]))
    points = points[(points == 0) | (points >= LEAST_LEVEL)]
    # separated() keeps float32 neighbours apart; equal candidates would be useless.
    return np.unique(separated(points, symmetric=False))


def best_on_grid(candidates: ArrayLike, moments: Moments, count: int, symmetric: bool) -> Array:
    """Return the ``count`` ascending candidates with the least Psi; the last one is 1. The
    candidates, more than ``count``, ascend from 0 to 1; ``moments`` are the law's there, k = 0..2.
    """
    x = np.asarray(candidates, dtype=np.float64)
    mass, mean, second = moments
    if symmetric:  # the first level is any positive candidate
        x, mass, mean, second = x[1:], mass[1:], mean[1:], second[1:]
        best = x**2 * mass - second
    else:
        best = np.where(np.arange(x.size) == 0, 0.0, np.inf)

    def cost(low: Array, high: Array) -> Array:
        a, c = x[low], x[high]
        between = (a + c) * (mean[high] - mean[low]) - (second[high] - second[low])
        return between - a * c * (mass[high] - mass[low])

    predecessors = []
    for layer in range(1, count):
        best, chosen = _next_layer(best, layer, cost)
        predecessors.append(chosen)
    path = [x.size - 1]
    for chosen in reversed(predecessors):
        path.append(chosen[path[-1]])
    return x[path[::-1]]


def _next_layer(
    best: Array, layer: int, cost: Callable[[np.ndarray, np.ndarray], Array]
) -> tuple[Array, Array]:
    """Return min and argmin over i < j of best[i] + cost(i, j), for all j >= layer.

    Rows j are solved from coarse to fine, each between the argmins of its two solved neighbours. A
    pass solves seven rows between two neighbours at once, since passes cost more than sums.
    """
    rows = best.size - layer
    chosen = np.full(best.size, layer - 1)
    values = np.full(best.size, np.inf)
    values[layer] = best[layer - 1] + cost(np.array(layer - 1), np.array(layer))
    wide = _PART
    while wide < rows:
        wide *= _PART
    while wide > 1:
        stride = wide // _PART
        at = np.arange(0, rows, stride)
        at = at[at % wide != 0]
        j, below = layer + at, layer + at // wide * wide
        least, beyond = chosen[below], below + wide
        solved = chosen[np.minimum(beyond, best.size - 1)]
        most = np.where(beyond < best.size, np.minimum(solved, j - 1), j - 1)
        # Of equal sums, a pass may take a later one for an earlier row.
        most = np.maximum(most, least)
        lengths = most - least + 1
        starts = np.cumsum(lengths) - lengths
        i = np.arange(lengths.sum()) + np.repeat(least - starts, lengths)
        sums = best[i] + cost(i, np.repeat(j, lengths))
        lowest = np.minimum.reduceat(sums, starts)
        hits = np.flatnonzero(sums == np.repeat(lowest, lengths))[::-1]
        owner = np.searchsorted(starts, hits, side="right") - 1
        chosen[j[owner]] = i[hits]  # the first of equal sums is written last
        values[j] = lowest
        wide = stride
    return values, chosen
