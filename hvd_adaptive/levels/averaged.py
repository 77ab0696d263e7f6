"""The law of averages of quantised gradients: what a second stage is fitted to.

An average of N decoded coordinates lies elsewhere than the coordinates themselves: where one rank
was rounded up to a high level, it is about that level/N, beyond all coordinates of a normal bucket.
A table fitted to the coordinates has next to no levels there, and its variance stays above a floor,
however many bits it has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.histogram import Histogram, tabulated
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
    """Law of |a|/||a|| of a bucket's average a over ``ranks`` ranks, whose coordinates of ``law``
    were rounded at random to a table: half of it of ranks with equal gradients, half of ranks with
    independent ones.

    By simulation with numbers of its own, the same on every call; large coordinates, which are rare
    and make the variance, are drawn more often and weigh less. 16 ranks stand for more.
    norm: that of ``law``; own_norm: that of a, the same where None. "l2": E||a||² = E a²/E r², as
    ||v|| is 1; "linf": the quantile that one coordinate of a bucket exceeds, whose share is E r²
    in a law of "l2" (1/d for d coordinates) and the atom at one in a law of "linf".
    Where the two differ it is good for code lengths alone, not for fitting levels: largest
    coordinates vary between buckets, and one quantile stands for all of them.
    """
    r, p = _points(tabulated(law))
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
            other = first if aligned else _signed(r[draw.permutation(_systematic(p))], draw)
            total += _rounded(other, levels, draw)
        average = np.abs(total) / count
        scale = _scale(average, weights, float(p @ r**2), share, own_norm or norm)
        samples.append(np.minimum(average / scale, 1.0))
    return Histogram.from_samples(np.concatenate(samples), np.tile(weights, 2))


def _points(law: Histogram) -> tuple[Array, Array]:
    """Bins' middles, zero and one, and their probabilities, without empty ones."""
    r = np.concatenate([[0.0], (law.edges[:-1] + law.edges[1:]) / 2, [1.0]])
    p = np.concatenate([[law.zero_mass], law.masses, [law.one_mass]])
    return r[p > 0], p[p > 0]


def _systematic(p: Array) -> np.ndarray:
    """``DRAWS`` indices of these probabilities, in order."""
    places = (np.arange(DRAWS) + 0.5) / DRAWS
    return np.minimum(np.searchsorted(np.cumsum(p), places), p.size - 1)


def _signed(r: Array, draw: np.random.Generator) -> Array:
    return np.where(draw.random(r.size) < 0.5, -r, r)


def _rounded(x: Array, levels: Array, draw: np.random.Generator) -> Array:
    """x in [-1, 1] to one of the two levels around it, without bias."""
    upper = np.clip(np.searchsorted(levels, x), 1, levels.size - 1)
    low, high = levels[upper - 1], levels[upper]
    return np.where(draw.random(x.size) * (high - low) < x - low, high, low)


def _scale(average: Array, weights: Array, square: float, share: float, norm: str) -> float:
    """The norm of a bucket's average, where its gradient has norm 1.

    square: E r².  share: of the largest coordinate.
    """
    if norm == "l2":
        return float(np.sqrt((weights @ average**2) / weights.sum() / square))
    order = np.argsort(average)
    below = np.cumsum(weights[order]) / weights.sum()
    largest = min(int(np.searchsorted(below, 1 - share)), order.size - 1)
    return float(average[order[largest]]) or 1.0
