"""Compute the law of averages of quantised gradients, to which a second stage is fitted.

An average of N decoded coordinates has another law than the coordinates. If one rank was rounded up
to a high level, the average is about that level/N, which exceeds all coordinates of a normal
bucket. A table fitted to the coordinates has almost no levels there, and its variance stays above a
floor for any number of bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution, Histogram
from hvd_adaptive.levels.magnitudes import signed_levels

DRAWS = 1 << 14
MOST_RANKS = 16
_KEY = 0x5EC0


def averaged_law(
    law: Distribution,
    magnitudes: ArrayLike,
    symmetric: bool,
    ranks: int,
    norm: str,
    own_norm: str | None = None,
) -> Histogram:
    """Return the law of |a|/||a|| for the average a of quantised buckets of several ranks.

    Half of the result belongs to ranks with equal gradients, half to ranks with independent
    gradients. The law is simulated with a fixed random key, so every call returns the same result.
    Large coordinates, which are rare and cause the variance, are drawn more often with smaller
    weights. More than 16 ranks are simulated as 16.

    Args:
        law: Law of the folded coordinates, normalised by ``norm``, "l2" or "linf".
        magnitudes: (K,), the table to which they are rounded.
        own_norm: The norm of a; ``norm`` if None. For "l2", E||a||² = E a²/E r², since ||v|| is 1.
            For "linf", the norm is the quantile that one coordinate of a bucket exceeds. The share
            of this coordinate is E r² for a law of "l2" (1/d for d coordinates), and the atom at
            one for a law of "linf". If the two norms differ, use the result for code lengths only,
            not to fit levels: largest coordinates vary between buckets, but one quantile represents
            all of them.
    """
    r, p = _points(law.tabulate())
    levels = np.asarray(signed_levels(np.asarray(magnitudes, dtype=np.float64), symmetric))
    draw = np.random.Generator(np.random.Philox(key=_KEY))
    count = min(ranks, MOST_RANKS)
    share = float(p @ r**2) if norm == "l2" else float(p[r == 1.0].sum())
    tilted = 0.5 * p + 0.5 * p * r**2 / (p @ r**2)
    own = _systematic(tilted)
    weights = p[own] / tilted[own]
    first = r[own]
    samples = []
    for aligned in (True, False):
        total = _rounded(first, levels, draw)
        for _ in range(count - 1):
            other = first
            if not aligned:
                other = r[draw.permutation(_systematic(p))]
                other = np.where(draw.random(other.size) < 0.5, -other, other)
            total += _rounded(other, levels, draw)
        average = np.abs(total) / count
        scale = _scale(average, weights, float(p @ r**2), share, own_norm or norm)
        samples.append(np.minimum(average / scale, 1.0))
    return Histogram.from_samples(np.concatenate(samples), np.tile(weights, 2))


def _points(law: Histogram) -> tuple[Array, Array]:
    """Return the bins' middles, zero and one, and their probabilities, without empty ones."""
    r = np.concatenate([[0.0], (law.edges[:-1] + law.edges[1:]) / 2, [1.0]])
    p = np.concatenate([[law.zero_mass], law.masses, [law.one_mass]])
    return r[p > 0], p[p > 0]


def _systematic(p: Array) -> np.ndarray:
    """Return ``DRAWS`` ascending indices, drawn systematically with these probabilities."""
    places = (np.arange(DRAWS) + 0.5) / DRAWS
    return np.minimum(np.searchsorted(np.cumsum(p), places), p.size - 1)


def _rounded(x: Array, levels: Array, draw: np.random.Generator) -> Array:
    """Round x in [-1, 1] to one of the two neighbouring levels, without bias."""
    upper = np.clip(np.searchsorted(levels, x), 1, levels.size - 1)
    low, high = levels[upper - 1], levels[upper]
    return np.where(draw.random(x.size) * (high - low) < x - low, high, low)


def _scale(average: Array, weights: Array, square: float, share: float, norm: str) -> float:
    """Return the norm of a bucket's average, for ``square`` = E r²; see ``averaged_law``."""
    if norm == "l2":
        return float(np.sqrt((weights @ average**2) / weights.sum() / square))
    order = np.argsort(average)
    below = np.cumsum(weights[order]) / weights.sum()
    largest = min(int(np.searchsorted(below, 1 - share)), order.size - 1)
    return float(average[order[largest]]) or 1.0
