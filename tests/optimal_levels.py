"""The empirical optimum: the table with the least measured variance on given samples.

It runs the package's dynamic programme, which test_levels_optimal.py compares with brute force, on
the samples' own moments.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels import Histogram
from hvd_adaptive.levels.distributions import Array, Moments
from hvd_adaptive.levels.optimal import grid_optimum


def optimal_levels(
    r: ArrayLike, count: int, symmetric: bool, weights: ArrayLike | None = None, grid: int = 4096
) -> Array:
    """Return the table of ``count`` magnitudes with the least measured variance.

    r: samples in [0, 1]; weights: the same shape. grid: candidate levels, more than ``count``.
    """
    r = np.asarray(r, dtype=np.float64).reshape(-1)
    w = np.ones_like(r) if weights is None else np.asarray(weights, float).reshape(-1)
    return grid_optimum(Samples.of(r, w), count, symmetric, grid)


class Samples(Histogram):
    """The histogram of samples, with the weighted moments of the samples themselves."""

    @classmethod
    def of(cls, r: Array, weights: Array | None = None) -> Samples:
        """r, weights: (n,)."""
        weights = np.ones_like(r) if weights is None else weights
        law = cls.from_samples(r, weights)
        order = np.argsort(r)
        law._sorted, w = r[order], weights[order] / weights.sum()
        powers = np.stack([w, w * law._sorted, w * law._sorted**2])
        law._prefix = np.concatenate([np.zeros((3, 1)), np.cumsum(powers, axis=1)], axis=1)
        return law

    def moments(self, x: ArrayLike, order: int = 2) -> Moments:
        return tuple(self._prefix[:, np.searchsorted(self._sorted, x, side="right")])
