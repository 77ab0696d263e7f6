"""Truncated normal distributions (ALQ paper, App. A), stable for any mean and deviation.

The paper's App. K names the difficulty: densities far from the mean vanish in floating point
without being zero. Here every exponential is taken relative to the density at the mode of the
interval, exponents are formed as products of differences, tails are Mills ratios (erfcx), and
where the closed form still subtracts nearly equal terms (an interval much narrower than sigma,
a mean many sigmas outside) the positive integrand is integrated by Gauss-Legendre instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erfcx

from hvd_adaptive.levels.distributions import Array, invert_cdf

# Deviations below are taken as this one: float32 levels cannot tell such points apart.
SIGMA_FLOOR = 1e-14

# Closed forms that lose more than these digits to cancellation are integrated numerically.
_CANCELLATION = 1e-4
# The integrand counts where it is within exp(-40) of its peak; 40 nodes integrate it to rounding.
_DROP = 40.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(40)
_ROOT_TWO_PI = np.sqrt(2 * np.pi)


def _mills(z: Array) -> Array:
    """(1 - Phi(z)) / phi(z) for z >= 0."""
    return np.sqrt(np.pi / 2) * erfcx(z / np.sqrt(2))


class TruncatedNormal:
    """Normal laws of mean mu and deviation sigma, truncated to [lower, upper].

    mu, sigma: numbers or arrays, one law each; x broadcasts against them. They are the parameters
    before truncation, not the mean and deviation of the law (App. A.2). sigma >= 0; zero, a bucket
    whose coordinates are all equal, counts as ``SIGMA_FLOOR``. Not finite or negative: ValueError.
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
        self.mass = self.interval(self.lower, self.upper)[0]

    def pdf(self, x: ArrayLike) -> Array:
        """Density, zero outside [lower, upper]: Eq. 16 without its spurious 1/sigma."""
        x = np.asarray(x, float)
        inside = (x >= self.lower) & (x <= self.upper)
        height = self._height(np.clip(x, self.lower, self.upper))
        return np.where(inside, height, 0.0) / self.mass

    def cdf(self, x: ArrayLike) -> Array:
        """Eq. 17."""
        return self.moments(x, order=0)[0]

    def partial_mean(self, x: ArrayLike) -> Array:
        """Integral of theta dF over [lower, x]."""
        return self.moments(x, order=1)[1]

    def partial_second(self, x: ArrayLike) -> Array:
        """Integral of theta**2 dF over [lower, x]."""
        return self.moments(x)[2]

    def ppf(self, y: ArrayLike) -> Array:
        """Inverse of ``cdf``, by bisection: Eq. 18 rounds to 0 or 1 inside when mu is far out."""
        y = np.broadcast_to(np.asarray(y, float), np.broadcast_shapes(np.shape(y), self.mu.shape))
        return invert_cdf(self.cdf, y, self.lower, self.upper)

    def moments(self, x: ArrayLike, order: int = 2) -> tuple[Array, ...]:
        """Integrals of theta**k dF over [lower, x], k = 0..order."""
        x = np.clip(np.asarray(x, float), self.lower, self.upper)
        return tuple(moment / self.mass for moment in self.interval(self.lower, x, order))

    def interval(
        self, start: ArrayLike, end: ArrayLike, order: int = 0, exact: bool = True
    ) -> tuple[Array, ...]:
        """Integrals of theta**k over [start, end] within the bounds, k = 0..order, of the density
        that is 1 at its highest point in [lower, upper].

        exact=False keeps to the closed forms: absolute rather than relative precision, and faster.
        """
        x, y, mu, sigma = np.broadcast_arrays(start, end, self.mu, self.sigma)
        x, y = np.asarray(x, float), np.asarray(y, float)
        left, right = self._height(x), self._height(y)
        u, v = (x - mu) / sigma, (y - mu) / sigma
        before, after = sigma * left * _mills(np.abs(u)), sigma * right * _mills(np.abs(v))
        # With mu inside (x, y) the mode is mu and the whole line weighs sigma * sqrt(2 pi).
        whole = np.where((u < 0) & (v > 0), sigma * _ROOT_TWO_PI, 0.0)
        mass = np.where(u >= 0, before - after, np.where(v <= 0, after - before, 0.0))
        mass = np.where(whole > 0, whole - before - after, mass)
        if exact:
            mass = self._repaired(0, mass, whole + before + after, x, y)
        results = [mass]
        variance = sigma**2
        terms = (
            (mu * mass, variance * left, -variance * right),
            ((mu**2 + variance) * mass, variance * (mu + x) * left, -variance * (mu + y) * right),
        )
        for power in range(1, order + 1):
            a, b, c = terms[power - 1]
            value = a + b + c
            if exact:
                value = self._repaired(power, value, np.abs(a) + np.abs(b) + np.abs(c), x, y)
            results.append(value)
        return tuple(results)

    def _height(self, x: Array) -> Array:
        """Density at x relative to the density at the mode."""
        mu, sigma, mode = self.mu, self.sigma, self._mode
        return np.exp(-((x - mode) / sigma) * (((x - mu) + (mode - mu)) / sigma) / 2)

    def _repaired(self, power: int, value: Array, size: Array, x: Array, y: Array) -> Array:
        """``value`` with the elements that cancelled integrated anew; size sums |terms|."""
        doubtful = np.abs(value) < _CANCELLATION * size
        if not doubtful.any():
            return value
        value = np.array(value)
        value[doubtful] = self._integrate(power, x, y, doubtful)
        return value

    def _integrate(self, power: int, x: Array, y: Array, where: np.ndarray) -> Array:
        """Gauss-Legendre integral of theta**power over the part of [x, y] that counts."""
        mu, sigma, mode = (
            np.broadcast_to(a, where.shape)[where] for a in (self.mu, self.sigma, self._mode)
        )
        x, y = x[where], y[where]
        peak = np.clip(mu, x, y)
        # Offsets from the peak, not positions: theta - mu must not be rounded at the scale of mu.
        slope = (peak - mu) / sigma
        reach = sigma * 2 * _DROP / (np.abs(slope) + np.sqrt(slope**2 + 2 * _DROP))
        low, high = np.maximum(x - peak, -reach), np.minimum(y - peak, reach)
        half = (high - low) / 2
        offset = (low + half)[:, None] + half[:, None] * _NODES
        exponent = (offset / sigma[:, None]) * (slope[:, None] + offset / sigma[:, None] / 2)
        scale = np.exp(-((peak - mode) / sigma) * (((peak - mu) + (mode - mu)) / sigma) / 2)
        values = (peak[:, None] + offset) ** power * np.exp(-exponent)
        return scale * half * (values @ _WEIGHTS)


class Folded:
    """The laws of r = |theta| in [0, 1], theta truncated normal on [-1, 1].

    mu, sigma as in TruncatedNormal; F_r(x) = F_theta(x) - F_theta(-x). Every integral is taken as
    the sum of those of the laws of mu and -mu over [0, x]: positive terms, nothing cancels.
    """

    def __init__(self, mu: ArrayLike, sigma: ArrayLike) -> None:
        self._sides = TruncatedNormal(mu, sigma), TruncatedNormal(-np.asarray(mu, float), sigma)
        right, left = (side.interval(0.0, 1.0)[0] for side in self._sides)
        self._mass = right + left

    def cdf(self, x: ArrayLike) -> Array:
        return self.moments(x, order=0)[0]

    def pdf(self, x: ArrayLike) -> Array:
        right, left = (side.pdf(x) * side.mass for side in self._sides)
        return np.where(np.asarray(x) >= 0, right + left, 0.0) / self._mass

    def partial_mean(self, x: ArrayLike) -> Array:
        return self.moments(x, order=1)[1]

    def partial_second(self, x: ArrayLike) -> Array:
        return self.moments(x)[2]

    def ppf(self, y: ArrayLike) -> Array:
        shape = np.broadcast_shapes(np.shape(y), self._mass.shape)
        return invert_cdf(self.cdf, np.broadcast_to(np.asarray(y, float), shape), 0.0, 1.0)

    def moments(self, x: ArrayLike, order: int = 2, exact: bool = True) -> tuple[Array, ...]:
        """Integrals of r**k dF over [0, x], k = 0..order; exact as in TruncatedNormal.interval."""
        x = np.clip(np.asarray(x, float), 0.0, 1.0)
        right, left = (side.interval(0.0, x, order, exact) for side in self._sides)
        return tuple((a + b) / self._mass for a, b in zip(right, left, strict=True))
