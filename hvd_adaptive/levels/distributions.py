"""Define the interface of a law of normalised coordinates that the fits use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Moments = tuple[Array, ...]  # the integrals of r**k dF, k = 0, 1, ...


@runtime_checkable
class Distribution(Protocol):
    """Law F of the folded coordinate r = |v_i|/||v|| in [0, 1] (ALQ paper, section 3).

    The law may have atoms at zero (exact zeros, padding, dead units) and at one (the largest
    coordinate under L-infinity normalisation). Every method accepts dimensionless arrays of any
    shape, and returns float64 of that shape. Folding is exact for any signs: the excess variance
    depends on |v_i| alone (ALQ Eqs 2, 28), so the density need not be even. Subclasses define
    ``moments``, ``pdf`` and ``ppf``.
    """

    def moments(self, x: ArrayLike, order: int = 2) -> Moments:
        """Return the integrals of r**k dF over [0, x], k = 0..order."""
        raise NotImplementedError

    def pdf(self, x: ArrayLike) -> Array:
        """Return the density of the part without atoms."""
        raise NotImplementedError

    def ppf(self, y: ArrayLike) -> Array:
        """Return the least x with F(x) >= y, for y in [0, 1]."""
        raise NotImplementedError

    def cdf(self, x: ArrayLike) -> Array:
        """Return F(x), including the atom at zero."""
        return self.moments(x, order=0)[0]

    def partial_mean(self, x: ArrayLike) -> Array:
        """Return the integral of r dF over [0, x]."""
        return self.moments(x, order=1)[1]

    def partial_second(self, x: ArrayLike) -> Array:
        """Return the integral of r**2 dF over [0, x]."""
        return self.moments(x)[2]


def invert_cdf(cdf: Callable[[Array], Array], y: ArrayLike, lower: float, upper: float) -> Array:
    """Return the least x in [lower, upper] with cdf(x) >= y, by bisection (ALQ App. C.1).

    ``cdf`` must be non-decreasing and vectorised. The bisection halves the order of the bit
    patterns, not the distance: 64 halvings reach neighbouring doubles of any size.
    """
    y = np.asarray(y, dtype=np.float64)
    low = _order(np.full(y.shape, lower, dtype=np.float64))
    high = _order(np.full(y.shape, upper, dtype=np.float64))
    at_start = cdf(np.full(y.shape, lower, dtype=np.float64)) >= y
    for _ in range(64):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        enough = cdf(_position(middle)) >= y
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle)
    return np.where(at_start, lower, _position(high))


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
