"""Define the law of a normalised coordinate that tables are fitted to."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Moments = tuple[Array, ...]  # the integrals of r**k dF, k = 0, 1, ...


class Distribution:
    """Law F of the folded coordinate r = |v_i|/||v|| in [0, 1] (ALQ paper, section 3).

    The law may have atoms at zero (exact zeros, padding, dead units) and at one (the largest
    coordinate under L-infinity normalisation). Every method accepts dimensionless arrays of any
    shape, and returns float64 of that shape. Folding is exact for any signs: the excess variance
    depends on |v_i| alone (ALQ Eqs 2, 28), so the density need not be even. Subclasses define
    ``moments`` and ``pdf``.

    Attributes:
        lower: Lower end of the support.
        upper: Upper end of the support.
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
