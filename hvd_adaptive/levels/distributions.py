"""Define the law of a normalised coordinate that tables are fitted to, and the piecewise-uniform
laws with atoms at zero and one on which the fits run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Moments = tuple[Array, ...]  # the integrals of r**k dF, k = 0, 1, ...

_COARSE, _FINE = np.arange(1, 128), np.arange(128 * 12 + 1)
# 8 bins per octave from 2^-28 and 128 from 2^-12. On real gradients, 8-bit tables fitted to 32 bins
# per octave have 4% more variance than the optimum; with 128 bins, less than 1%. The index of a bin
# is read from the top bits of a float32.
_LOW = np.exp2(-28.0 + _COARSE // 8) * (1 + _COARSE % 8 / 8)
_HIGH = np.exp2(-12.0 + _FINE // 128) * (1 + _FINE % 128 / 128)
LOG_EDGES: Array = np.concatenate([[0.0], _LOW, _HIGH])
LOG_EDGES.flags.writeable = False
LOG_BINS = LOG_EDGES.size - 1


class Distribution:
    """Law F of the folded coordinate r = |v_i|/||v|| in [lower, upper] = [0, 1] (ALQ paper, section
    3).

    The law may have atoms at zero (exact zeros, padding, dead units) and at one (the largest
    coordinate under L-infinity normalisation). Every method accepts dimensionless arrays of any
    shape, and returns float64 of that shape. Folding is exact for any signs: the excess variance
    depends on |v_i| alone (ALQ Eqs 2, 28), so the density need not be even. Subclasses define
    ``moments`` and ``pdf``.
    """

    lower, upper = 0.0, 1.0

    def moments(self, x: ArrayLike, order: int = 2) -> Moments:
        """Return the integrals of r**k dF over [lower, x], k = 0..order."""
        raise NotImplementedError

    def pdf(self, x: ArrayLike) -> Array:
        """Return the density of the part without atoms."""
        raise NotImplementedError

    def cdf(self, x: ArrayLike) -> Array:
        """Return F(x), including the atom at zero."""
        return self.moments(x, order=0)[0]

    def ppf(self, y: ArrayLike) -> Array:
        """Return the least x with F(x) >= y, for y in [0, 1], by bisection (ALQ App. C.1).

        The bisection halves the order of the bit patterns, not the distance: 64 halvings reach
        neighbouring doubles of any size.
        """
        y = np.asarray(y, dtype=np.float64)
        at_start = self.cdf(self.lower) >= y
        low, high = (_order(np.full(at_start.shape, end)) for end in (self.lower, self.upper))
        for _ in range(64):
            middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
            enough = self.cdf(_position(middle)) >= y
            high = np.where(enough, middle, high)
            low = np.where(enough, low, middle)
        return np.where(at_start, self.lower, _position(high))

    def tabulate(self) -> Histogram:
        """Return the law's histogram on ``LOG_EDGES``; a Histogram is returned unchanged."""
        cdf = np.maximum.accumulate(self.cdf(LOG_EDGES))
        one_mass = max(0.0, float(cdf[-1] - self.cdf(np.nextafter(1.0, 0.0))))
        masses = np.diff(cdf)
        masses[-1] = max(masses[-1] - one_mass, 0.0)
        return Histogram(LOG_EDGES, masses, float(cdf[0]), one_mass)


class Histogram(Distribution):
    """Law with a uniform density within each bin, plus atoms at zero and at one.

    Every method is a closed form of moments cumulated up to each edge.

    Args:
        edges: (m + 1,) ascending within [0, 1], else ValueError.
        masses: (m,). All masses, including the atoms, are scaled to sum to one; negative, infinite,
            NaN or no masses raise ValueError.
        zero_mass, one_mass: Masses of the atoms.
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
        """Build a histogram of counts (LOG_BINS + 2,): of bins of ``LOG_EDGES``, zeros and ones."""
        counts = np.asarray(counts, dtype=np.float64)
        return cls(LOG_EDGES, counts[:LOG_BINS], *counts[LOG_BINS:])

    @classmethod
    def from_samples(cls, r: ArrayLike, weights: ArrayLike | None = None) -> Histogram:
        """Build a histogram on ``LOG_EDGES`` from samples of r, of any shape, and their weights.
        Samples beyond 1 by rounding (at most 1e-6) count as 1, others outside [0, 1] raise
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
        """Return the integrals of r**k dF over [0, x], k = 0..2, whatever ``order``: all three cost
        little more than one.
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
        """Return the b in [0, c] with 2 b F(b) = integral of (c - r) dF over (b, c], for c <= 1.

        This is the optimal l1 of a symmetric table with l2 = c (ALQ Eq. 31, for normals Eq. 35,
        folded). The paper's F(b) - F(0) is half as large (the positive half of an even law) and
        omits an atom at zero, which contributes to l1^2 F(l1). The equation is quadratic within a
        bin; the bin is found from the values at the edges.
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

    def tabulate(self) -> Histogram:
        """Return this histogram."""
        return self


def _order(x: Array) -> NDArray[np.int64]:
    """Map doubles to integers in the same order."""
    return _reflect(x.view(np.int64))


def _position(order: NDArray[np.int64]) -> Array:
    """Invert ``_order``."""
    return _reflect(order).view(np.float64)


def _reflect(signed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Convert negative integers from sign-and-magnitude to two's complement, or back."""
    lowest = np.iinfo(np.int64).min
    return np.where(signed < 0, lowest - np.minimum(signed, 0), signed)


def _cumulate(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
