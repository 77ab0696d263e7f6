"""Define piecewise-uniform laws with atoms at zero and one, on which the fits run."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution, Moments

_COARSE, _FINE = np.arange(1, 128), np.arange(128 * 12 + 1)
# 8 bins per octave from 2^-28 and 128 from 2^-12. On real gradients, 8-bit tables fitted to 32 bins
# per octave have 4% more variance than the optimum; with 128 bins, less than 1%. The index of a bin
# is read from the top bits of a float32.
_LOW = np.exp2(-28.0 + _COARSE // 8) * (1 + _COARSE % 8 / 8)
_HIGH = np.exp2(-12.0 + _FINE // 128) * (1 + _FINE % 128 / 128)
LOG_EDGES: Array = np.concatenate([[0.0], _LOW, _HIGH])
LOG_EDGES.flags.writeable = False
LOG_BINS = LOG_EDGES.size - 1


class Histogram(Distribution):
    """Law with a uniform density within each bin, plus atoms at zero and at one.

    Every method is a closed form of moments cumulated up to each edge.

    Args:
        edges: (m + 1,) ascending within [0, 1].
        masses: (m,), not negative. All masses, including the atoms, are scaled to sum to one.
        zero_mass: Mass of the atom at zero.
        one_mass: Mass of the atom at one.

    Raises:
        ValueError: Masses are negative, infinite, NaN or all zero, or edges are out of order.
    """

    def __init__(
        self, edges: ArrayLike, masses: ArrayLike, zero_mass: float = 0.0, one_mass: float = 0.0
    ) -> None:
        edges, masses = np.array(edges, dtype=np.float64), np.array(masses, dtype=np.float64)
        if edges.ndim != 1 or masses.shape != (edges.size - 1,) or edges.size < 2:
            raise ValueError(f"edges, masses: shapes {edges.shape}, {masses.shape} do not match")
        if not (np.all(np.diff(edges) > 0) and edges[0] >= 0 and edges[-1] <= 1):
            raise ValueError("edges: must ascend strictly within [0, 1]")
        everything = np.concatenate([masses, [zero_mass, one_mass]])
        total = everything.sum()
        if not (np.isfinite(total) and np.all(everything >= 0) and total > 0):
            raise ValueError("masses: must be finite, not negative, and not all zero")
        self.edges, self.masses = edges, masses / total
        self.zero_mass, self.one_mass = float(zero_mass / total), float(one_mass / total)
        self.density = self.masses / np.diff(edges)
        self._cdf = self.zero_mass + _cumulate(self.masses)
        self._mean = _cumulate(self.masses * (edges[:-1] + edges[1:]) / 2)
        squares = (edges[:-1] ** 2 + edges[:-1] * edges[1:] + edges[1:] ** 2) / 3
        self._second = _cumulate(self.masses * squares)

    @classmethod
    def from_counts(cls, counts: ArrayLike) -> Histogram:
        """Build a histogram from the non-negative counts (LOG_BINS + 2,) of ``LOG_EDGES``' bins, of
        zeros and of ones.
        """
        counts = np.asarray(counts, dtype=np.float64)
        if counts.shape != (LOG_BINS + 2,):
            raise ValueError(f"counts: must have shape {(LOG_BINS + 2,)}, not {counts.shape}")
        return cls(LOG_EDGES, counts[:LOG_BINS], *counts[LOG_BINS:])

    @classmethod
    def from_samples(cls, r: ArrayLike, weights: ArrayLike | None = None) -> Histogram:
        """Build a histogram on ``LOG_EDGES`` from samples of r, of any shape, and their weights.

        Samples that exceed 1 by rounding (at most 1e-6) count as 1. Others outside [0, 1] raise
        ValueError.
        """
        r = np.asarray(r, dtype=np.float64).reshape(-1)
        if not np.all((r >= 0) & (r <= 1 + 1e-6)):
            raise ValueError("r: must lie within [0, 1]")
        w = np.ones_like(r) if weights is None else np.asarray(weights, float).reshape(-1)
        inside = (r > 0) & (r < 1)
        bins = np.searchsorted(LOG_EDGES, r[inside], side="right") - 1
        masses = np.bincount(bins, weights=w[inside], minlength=LOG_BINS)
        return cls(LOG_EDGES, masses, w[r == 0].sum(), w[r >= 1].sum())

    def moments(self, x: ArrayLike, order: int = 2) -> Moments:
        """Return the integrals of r**k dF over [0, x], k = 0..2, from a single search for the bins.

        ``order`` has no effect: all three cost little more than one.
        """
        x = np.asarray(x, dtype=np.float64)
        bins = np.searchsorted(self.edges[1:-1], x, side="right")
        low, density = self.edges[bins], self.density[bins]
        inside = np.minimum(np.maximum(x, low), self.edges[-1])
        mass = density * (inside - low)
        at_one = np.where(x >= 1.0, self.one_mass, 0.0)
        cdf = np.where(x >= 0, self._cdf[bins] + mass + at_one, 0.0)
        mean = self._mean[bins] + mass * ((inside + low) / 2) + at_one
        square = (inside * inside + inside * low + low * low) / 3
        return cdf, mean, self._second[bins] + mass * square + at_one

    def pdf(self, x: ArrayLike) -> Array:
        """Return the density to the right of x (to the left at the last edge)."""
        x = np.asarray(x, dtype=np.float64)
        bins = np.searchsorted(self.edges[1:-1], x, side="right")
        return np.where((x >= self.edges[0]) & (x <= self.edges[-1]), self.density[bins], 0.0)

    def ppf(self, y: ArrayLike) -> Array:
        """Return the least x with F(x) >= y, for y in [0, 1]."""
        y = np.asarray(y, dtype=np.float64)
        # Bins with F(low) < y <= F(high) have mass, so their density is nonzero.
        bins = np.clip(np.searchsorted(self._cdf, y) - 1, 0, self.masses.size - 1)
        density = self.density[bins]
        above = np.maximum(y - self._cdf[bins], 0.0)
        step = np.divide(above, density, out=np.zeros(y.shape), where=density > 0)
        x = np.minimum(self.edges[bins] + step, self.edges[bins + 1])
        return np.where(y <= self.zero_mass, 0.0, np.where(y > self._cdf[-1], 1.0, x))

    def cube_root_points(self, steps: Array) -> Array:
        """Return the points up to which density**(1/3) integrates to these shares of its integral.

        Some mass must lie between the atoms.
        """
        roots = np.cumsum(np.cbrt(self.density) * np.diff(self.edges))
        return np.interp(steps, np.concatenate([[0.0], roots / roots[-1]]), self.edges)

    def balance_point(self, c: ArrayLike) -> Array:
        """Return the b in [0, c] with 2 b F(b) = integral of (c - r) dF over (b, c].

        This is ALQ Eq. 31 folded. F(b) includes the atom at zero (see ``first_level``). The
        equation is quadratic within a bin; the bin is found from the values at the edges.

        Args:
            c: Any shape, <= 1.
        """
        c = np.asarray(c, dtype=np.float64)
        mass, mean, _ = self.moments(c)
        goal = (c * mass - mean)[..., None]
        at_edges = 2 * self.edges * self._cdf + c[..., None] * self._cdf - self._mean
        bins = np.maximum(np.count_nonzero(at_edges < goal, axis=-1) - 1, 0)
        bins = np.minimum(bins, self.masses.size - 1)
        low, density = self.edges[bins], self.density[bins]
        # With t = b - low: 1.5 density t**2 + slope t = lack.
        slope = 2 * self._cdf[bins] + density * (low + c)
        below = np.take_along_axis(at_edges, bins[..., None], -1)
        lack = np.maximum(goal - below, 0.0)[..., 0]
        root = slope + np.hypot(slope, np.sqrt(6 * density * lack))
        step = np.divide(2 * lack, root, out=np.zeros(c.shape), where=root > 0)
        return np.minimum(np.minimum(low + step, self.edges[bins + 1]), c)


def tabulated(distribution: Distribution) -> Histogram:
    """Return the histogram of any law on ``LOG_EDGES``; a Histogram is returned unchanged."""
    if isinstance(distribution, Histogram):
        return distribution
    own = getattr(distribution, "tabulate", None)
    if own is not None:
        return own()
    cdf = np.maximum.accumulate(distribution.cdf(LOG_EDGES))
    one_mass = max(0.0, float(cdf[-1] - distribution.cdf(np.nextafter(1.0, 0.0))))
    masses = np.diff(cdf)
    masses[-1] = max(masses[-1] - one_mass, 0.0)
    return Histogram(LOG_EDGES, masses, float(cdf[0]), one_mass)


def _cumulate(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
