"""Compute the variance that quantising adds to a vector: exact, bounds for every vector, and their
average over a run whose level table changes (ALQ section 4).

A bound epsilon_Q means E||Q(v) - v||_2^2 <= epsilon_Q ||v||_2^2 for every v of ``dimension``
coordinates under Lq normalisation. If the gradient is split into buckets, the dimension is the
bucket's. The bound then holds for the whole gradient (QSGD, section 4), since each bucket satisfies
it and squared norms add up.

The functions share these arguments, and raise ValueError for one that is out of range:

    magnitudes   (K,), as in ``levels.check_magnitudes``
    dimension    d, coordinates of the vector or bucket
    norm_order   q of the Lq norm, 1 <= q <= inf
    symmetric    whether the table is symmetric

All bounds use the cost (high - r)(r - low) of one coordinate r = |v_i|/||v||_q between neighbouring
levels, and the reach l1 d^(1/min(q,2)) >= l1 ||v||_q sqrt(d)/||v||_2 of the first level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

import hvd_adaptive.levels.worst_case as worst_case
from hvd_adaptive.levels import check_magnitudes, exponential_magnitudes, sample_variance
from hvd_adaptive.theory.arguments import (
    check_count,
    check_not_negative,
    check_order,
    check_positive,
)


def exact_variance(
    magnitudes: ArrayLike, vector: ArrayLike, norm_order: float = 2, symmetric: bool = False
) -> float:
    """Return E||Q(v) - v||_2^2 over the rounding alone (ALQ Eqs 1, 2; symmetric: Eqs 27, 28).

    ``vector`` holds finite numbers of any shape, which form one bucket. The result is in its
    squared unit; it is 0 for the zero vector, which is exact.
    """
    magnitudes = check_magnitudes(magnitudes, symmetric)
    v = np.abs(np.asarray(vector, dtype=np.float64)).reshape(-1)
    largest = np.max(v, initial=0.0)
    if not np.isfinite(largest):
        raise ValueError("vector: must be finite")
    if largest == 0:
        return 0.0
    # Powers of coordinates, squared or of a large q, must neither overflow nor vanish.
    scale = np.linalg.norm(v / largest, ord=check_order(norm_order))
    r = np.minimum(v / largest / scale, 1.0)
    return float((largest * scale) ** 2 * sample_variance(magnitudes, r, symmetric))


def variance_bound(
    magnitudes: ArrayLike, dimension: int, norm_order: float = 2, symmetric: bool = False
) -> float:
    """Return epsilon_Q of any table: ALQ Theorem 2; symmetric: Theorem 9.

    ``levels.worst_case.worst_variance`` derives it. The bound is nearly reached under L1 and L2.
    Under L-infinity it is up to twice the worst case, since the largest coordinate is exact.
    """
    levels = check_magnitudes(magnitudes, symmetric)
    return worst_case.worst_variance(levels, _spread(dimension, norm_order), symmetric)


def small_coordinates(reach: float) -> float:
    """Return inf over 0 < p < 1 of K_p reach**(2 - p), the cost bound of coordinates in [0, l1].

    Source: ALQ Theorem 2. ``reach`` is l1 d**(1/min(q, 2)); see ``worst_case.small_coordinates``.
    """
    return worst_case.small_coordinates(check_not_negative("reach", reach))


def exponent_constant(exponent: float) -> float:
    """Return K_p (Theorem 2, Eq. 41): the least K with r (l1 - r) <= K l1^(2-p) r^p on [0, l1]."""
    p = check_positive("exponent", exponent, below=1.0)
    return float(((1 - p) / (2 - p)) ** (1 - p) / (2 - p))


def qsgd_variance_bound(intervals: int, dimension: int, norm_order: float = 2) -> float:
    """Return min(d/s^2, sqrt(d)/s) for s uniform intervals: QSGD Lemma 3.1 (ii), Theorem 3.2.

    The paper proves the bound for the L2 norm. It holds unchanged for every q >= 2, and so for
    L-infinity, which the paper uses in practice (section 4): with ||v||_q^2 before the sum, a
    coordinate costs at most min(1/(4 s^2), r/s), and ||v||_q <= ||v||_2, ||v||_1 <= sqrt(d)
    ||v||_2. For q < 2 the same steps give d^(1/q) instead of sqrt(d). ``variance_bound`` of the
    same table is often less.
    """
    reach = _spread(dimension, norm_order) / check_count("intervals", intervals)
    return float(min(reach**2, reach))


def nuqsgd_variance_bound(
    internal_levels: int, dimension: int, multiplier: float = 0.5, norm_order: float = 2
) -> float:
    """Return epsilon_Q of the levels 0, p^s, ..., p, 1: NUQSGD Theorem 2.

    It is ALQ's Theorem 2 at l1 = p^s and ratio 1/p:
    1/8 + inf_p K_p 2^(-s(2-p)) d^(1-p/2) for multiplier 1/2 and q = 2. ``internal_levels`` is s >=
    1, the number of levels between 0 and 1, and ``multiplier`` is p in (0, 1).
    """
    count = check_count("internal_levels", internal_levels) + 2
    p = check_positive("multiplier", multiplier, below=1.0)
    table = exponential_magnitudes(count, p, symmetric=False)
    return variance_bound(table, dimension, norm_order, symmetric=False)


def _spread(dimension: int, norm_order: float) -> float:
    """Return d**(1/min(q, 2)), the largest ||v||_q sqrt(d) / ||v||_2 of d coordinates."""
    return check_count("dimension", dimension) ** (1 / min(check_order(norm_order), 2))


@dataclass(frozen=True)
class Segment:
    """Consecutive iterations that use one level table.

    Attributes:
        steps: T_k, number of iterations, >= 1.
        variance_bound: epsilon_{Q,k}, >= 0.
        code_length: N_{Q,k}, bits per iteration and processor, >= 0.
    """

    steps: int
    variance_bound: float
    code_length: float

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_not_negative("variance_bound", self.variance_bound)
        check_not_negative("code_length", self.code_length)


@dataclass
class RunAverages:
    """Averages of a run that the convergence bounds of ALQ Theorems 4 and 6-8 use.

    Segments may hold bounds or measured values. Averages of measured values are estimates of the
    quantities in the theorems. The averages raise ValueError if there are no segments.
    """

    segments: list[Segment] = field(default_factory=list)

    def add(self, steps: int, variance_bound: float, code_length: float = 0.0) -> None:
        """Append a ``Segment``."""
        self.segments.append(Segment(steps, variance_bound, code_length))

    @property
    def steps(self) -> int:
        """Return T, the number of iterations."""
        return sum(segment.steps for segment in self.segments)

    @property
    def variance_bound(self) -> float:
        """Return epsilon_Q = sum_k T_k epsilon_{Q,k} / T."""
        return self._mean("variance_bound")

    @property
    def code_length(self) -> float:
        """Return N_Q = sum_k T_k N_{Q,k} / T, in bits per iteration and processor."""
        return self._mean("code_length")

    @property
    def total_bits(self) -> float:
        """Return T N_Q, the bits that one processor sends in the whole run."""
        return math.fsum(s.steps * s.code_length for s in self.segments)

    def _mean(self, name: str) -> float:
        if not self.segments:
            raise ValueError("segments: must not be empty")
        return math.fsum(s.steps * getattr(s, name) for s in self.segments) / self.steps
