"""Compute truncated normal distributions (ALQ App. A), stably for any mean and deviation, and their
mixtures, the paper's model of gradients.

App. K of the paper names the difficulty: densities far from the mean vanish in floating point
without being zero. Here every exponential is relative to the density at the mode of the interval,
exponents are products of differences, and tails are Mills ratios (erfcx). If a mass still subtracts
nearly equal terms (an interval much narrower than sigma, or a mean many sigmas outside), and for
higher moments, the integrals are computed by Gauss-Legendre quadrature.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import LOG_EDGES, Array, Distribution, Histogram, Moments

# Smaller deviations are replaced by this one: float32 levels cannot separate such points.
SIGMA_FLOOR = 1e-14

# A mass whose closed form loses more than this share to cancellation is integrated numerically.
_CANCELLATION = 1e-4
# Range of integration: the density exceeds exp(-40) of its peak. 40 nodes are exact up to rounding.
_DROP = 40.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(40)
_ROOT_TWO_PI = np.sqrt(2 * np.pi)
# Points times components per pass of a mixture; temporaries then fit in the cache.
_CHUNK = 1 << 16


def _mills(z: Array) -> Array:
    """Return (1 - Phi(z)) / phi(z) for z >= 0."""
    from scipy.special import erfcx  # slow to import, and only statistics="normal" needs it

    return np.sqrt(np.pi / 2) * erfcx(z / np.sqrt(2))


class TruncatedNormal(Distribution):
    """Normal laws of mean mu and deviation sigma, truncated to [lower, upper]; raise ValueError
    unless all are finite, sigma is not negative, and the ends ascend.

    Args:
        mu: Number or array, one law for each element; x broadcasts against it. This is the mean
            before truncation, not the mean of the law (App. A.2).
        sigma: Deviation before truncation. Zero (a bucket with equal coordinates) counts as
            ``SIGMA_FLOOR``.
    """

    def __init__(
        self, mu: ArrayLike, sigma: ArrayLike, lower: float = -1.0, upper: float = 1.0
    ) -> None:
        mu, sigma = np.broadcast_arrays(np.asarray(mu, float), np.asarray(sigma, float))
        if not np.isfinite(mu).all():
            raise ValueError("mu: must be finite")
        if not (np.isfinite(sigma).all() and (sigma >= 0).all()):
            raise ValueError("sigma: must be finite and not negative")
        if not -np.inf < lower < upper < np.inf:
            raise ValueError(f"lower, upper: must be finite and ascending, not {lower}, {upper}")
        self.mu, self.sigma = mu, np.maximum(sigma, SIGMA_FLOOR)
        self.lower, self.upper = float(lower), float(upper)
        self._mode = np.clip(mu, self.lower, self.upper)
        self.mass = self.integrals(self.lower, self.upper)[0]

    def pdf(self, x: ArrayLike) -> Array:
        """Return the density, zero outside [lower, upper]: Eq. 16 without its spurious 1/sigma."""
        x = np.asarray(x, float)
        inside = (x >= self.lower) & (x <= self.upper)
        height = self._height(np.clip(x, self.lower, self.upper))
        return np.where(inside, height, 0.0) / self.mass

    def moments(self, x: ArrayLike, order: int = 2) -> Moments:
        """Return the integrals of theta**k dF over [lower, x], k = 0..order (Eq. 17 for k = 0)."""
        x = np.clip(np.asarray(x, float), self.lower, self.upper)
        return tuple(integral / self.mass for integral in self.integrals(self.lower, x, order))

    def integrals(
        self, start: ArrayLike, end: ArrayLike, order: int = 0, exact: bool = True
    ) -> Moments:
        """Integrate theta**k times the relative density over [start, end], k = 0..order.

        The relative density is 1 at its highest point in [lower, upper]. ``start`` and ``end`` must
        lie within these bounds. With ``exact=False`` the integral for k = 0 is always the closed
        form: its precision is then absolute rather than relative, and the computation is faster.
        """
        x, y, mu, sigma = np.broadcast_arrays(np.asarray(start, float), end, self.mu, self.sigma)
        u, v = (x - mu) / sigma, (y - mu) / sigma
        before = sigma * self._height(x) * _mills(np.abs(u))
        after = sigma * self._height(y) * _mills(np.abs(v))
        # If mu lies in (x, y), the mode is mu and the mass of the whole line is sigma * sqrt(2 pi).
        whole = np.where((u < 0) & (v > 0), sigma * _ROOT_TWO_PI, 0.0)
        mass = np.where(u >= 0, before - after, after - before)
        mass = np.where(whole > 0, whole - before - after, mass)
        if exact:
            cancelled = np.abs(mass) < _CANCELLATION * (whole + before + after)
            if cancelled.any():
                mass = np.where(cancelled, self._quadrature(0, x, y), mass)
        return mass, *(self._quadrature(power, x, y) for power in range(1, order + 1))

    def _height(self, x: Array) -> Array:
        """Return the density at x relative to the density at the mode."""
        mu, sigma, mode = self.mu, self.sigma, self._mode
        return np.exp(-((x - mode) / sigma) * (((x - mu) + (mode - mu)) / sigma) / 2)

    def _quadrature(self, power: int, x: Array, y: Array) -> Array:
        """Integrate theta**power by Gauss-Legendre over the part of [x, y] that contributes."""
        mu, sigma = self.mu, self.sigma
        peak = np.clip(mu, x, y)
        slope = (peak - mu) / sigma
        reach = sigma * 2 * _DROP / (np.abs(slope) + np.sqrt(slope**2 + 2 * _DROP))
        low, high = np.maximum(x - peak, -reach), np.minimum(y - peak, reach)
        half = (high - low) / 2
        # Offsets from the peak: theta - mu must not be rounded at the scale of mu.
        offset = (low + half)[..., None] + half[..., None] * _NODES
        steps = offset / sigma[..., None]
        values = np.exp(-steps * (slope[..., None] + steps / 2))
        if power:
            values *= (peak[..., None] + offset) ** power
        return self._height(peak) * half * (values @ _WEIGHTS)


class Mixture(Distribution):
    """Law F = sum of gamma_n F_n of r = |theta| over N buckets (ALQ Eq. 10), in which theta is
    truncated normal on [-1, 1].

    F_n(x) = F_theta(x) - F_theta(-x). Every integral is the sum of the integrals of the laws of mu
    and -mu over [0, x], so all terms are positive and nothing cancels. One component is the
    ``normalized`` case of App. K.1.

    Args:
        mu, sigma: (N,), mean and deviation of each bucket's normalised signed coordinates.
        weights: (N,), proportional to ||v_n||**2 for the expected variance (section 3.4; the
            authors' code uses ||v_n||, the paper is right). They are scaled to sum to one. Negative
            weights, zeros alone, or other shapes raise ValueError.
    """

    def __init__(self, mu: ArrayLike, sigma: ArrayLike, weights: ArrayLike) -> None:
        mu, sigma, weights = (np.atleast_1d(np.asarray(a, float)) for a in (mu, sigma, weights))
        if not (mu.ndim == 1 and mu.size > 0 and mu.shape == sigma.shape == weights.shape):
            raise ValueError(
                "mu, sigma, weights: must have the same length and not be empty, not "
                f"{mu.shape}, {sigma.shape}, {weights.shape}"
            )
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
            raise ValueError("weights: must be finite, not negative, and not all zero")
        self.weights = weights / weights.sum()
        self._sides = TruncatedNormal(mu, sigma), TruncatedNormal(-mu, sigma)
        right, left = (side.integrals(0.0, 1.0)[0] for side in self._sides)
        self._masses = right + left

    def pdf(self, x: ArrayLike) -> Array:
        """Return the density at x; 0 for x < 0."""
        x = np.asarray(x, float)[..., None]
        right, left = (side.pdf(x) * side.mass for side in self._sides)
        return np.where(x >= 0, right + left, 0.0) / self._masses @ self.weights

    def moments(self, x: ArrayLike, order: int = 2, exact: bool = True) -> Moments:
        """Return the integrals of r**k dF over [0, x], k = 0..order (``integrals``)."""
        x = np.asarray(x, float)
        flat = np.clip(x.reshape(-1), 0.0, 1.0)
        result = np.empty((order + 1, flat.size))
        step = max(1, _CHUNK // self.weights.size)
        for start in range(0, flat.size, step):
            part = slice(start, start + step)
            sides = (side.integrals(0.0, flat[part, None], order, exact) for side in self._sides)
            for row, right, left in zip(result, *sides, strict=True):
                row[part] = (right + left) / self._masses @ self.weights
        return tuple(result.reshape((order + 1, *x.shape)))

    def tabulate(self) -> Histogram:
        """Return the histogram of the mixture, whose masses have an absolute error of at most
        1e-15. The cost of a fit then does not depend on the number of components.
        """
        cumulated = self.moments(LOG_EDGES[1:-1], order=0, exact=False)[0]
        cumulated = np.clip(np.concatenate([[0.0], cumulated, [1.0]]), 0.0, 1.0)
        return Histogram(LOG_EDGES, np.diff(np.maximum.accumulate(cumulated)))
