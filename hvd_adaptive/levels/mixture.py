"""Define weighted mixtures of folded truncated normals, the ALQ paper's model of gradients."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution, Moments, invert_cdf
from hvd_adaptive.levels.histogram import LOG_EDGES, Histogram
from hvd_adaptive.levels.truncated_normal import Folded

# Points times components per pass; temporaries then fit in the cache.
_CHUNK = 1 << 16


class Mixture(Distribution):
    """Law F = sum of gamma_n F_n over the folded truncated normals of N buckets (ALQ Eq. 10).

    One component is the ``normalized`` case of App. K.1.

    Args:
        mu: (N,), mean of each bucket's normalised signed coordinates.
        sigma: (N,), deviation of each bucket's normalised signed coordinates.
        weights: (N,), proportional to ||v_n||**2 for the expected variance (section 3.4; the
            authors' code uses ||v_n||, the paper is right). They are scaled to sum to one.

    Raises:
        ValueError: Shapes differ, there is no component, or weights are negative or all zero.
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
        self.components = Folded(mu, sigma)

    def pdf(self, x: ArrayLike) -> Array:
        """Return the density at x."""
        return self.components.pdf(np.asarray(x, float)[..., None]) @ self.weights

    def ppf(self, y: ArrayLike) -> Array:
        """Return the least x with F(x) >= y, by bisection: mixtures have no closed inverse."""
        return invert_cdf(self.cdf, y, 0.0, 1.0)

    def moments(self, x: ArrayLike, order: int = 2, exact: bool = True) -> Moments:
        """Return the integrals of r**k dF over [0, x], k = 0..order.

        ``exact`` is described in ``TruncatedNormal.interval``.
        """
        x = np.asarray(x, float)
        flat = x.reshape(-1)
        result = np.empty((order + 1, flat.size))
        step = max(1, _CHUNK // self.weights.size)
        for start in range(0, flat.size, step):
            part = slice(start, start + step)
            moments = self.components.moments(flat[part, None], order, exact)
            for row, moment in zip(result, moments, strict=True):
                row[part] = moment @ self.weights
        return tuple(result.reshape((order + 1, *x.shape)))

    def tabulate(self, edges: ArrayLike = LOG_EDGES) -> Histogram:
        """Return the histogram of the mixture.

        The cost of a fit then does not depend on the number of components.

        Args:
            edges: Ascending from 0 to 1.

        Returns:
            A Histogram whose masses have an absolute error of at most 1e-15.
        """
        edges = np.asarray(edges, float)
        cumulated = self.moments(edges[1:-1], order=0, exact=False)[0]
        cumulated = np.clip(np.concatenate([[0.0], cumulated, [1.0]]), 0.0, 1.0)
        return Histogram(edges, np.diff(np.maximum.accumulate(cumulated)))
