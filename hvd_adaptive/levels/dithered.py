"""Compute the law of the integers that dithered quantisation sends, for each class of dither.

A coordinate of size t (in any unit) and random sign is sent as q = round(±t/step + a), where the
dither a is uniform in [0, 1/2). The sign comes from the dither (schemes/ecdq.py), so the law of ±t
is even for any signs of the coordinates. [0, 1/2) is cut into ``classes`` equal parts, the classes.
Receivers can compute the class, so each class has its own code book.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution


def dithered_probabilities(law: Distribution, step: float, classes: int, most: int) -> Array:
    """Return P(q | class) for q = -most..most, then of all other integers: (classes, 2 most + 2).
    The law of the sizes t in [0, 1] may have an atom at zero; step > 0 is in the unit of t.
    """
    at_most = _at_most(law, step, classes, np.arange(-most - 1, most + 1))
    inside = np.maximum(np.diff(at_most, axis=1), 0.0)
    rest = np.maximum(1.0 - inside.sum(axis=1, keepdims=True), 0.0)
    return np.concatenate([inside, rest], axis=1)


def dithered_tail(law: Distribution, step: float, classes: int, most: ArrayLike) -> Array:
    """Return P(abs(q) > most | class): (classes, number of ``most``)."""
    most = np.asarray(most)
    above = _at_most(law, step, classes, most) - _at_most(law, step, classes, -most - 1)
    return np.maximum(1.0 - above, 0.0)


def _at_most(law: Distribution, step: float, classes: int, k: np.ndarray) -> Array:
    """Return P(q <= k | class): (classes, number of k).

    With G the distribution function of ±t/step and a in [b, c), P(q <= k | a) = G(k + 1/2 - a). The
    mean over the class is (J(k + 1/2 - b) - J(k + 1/2 - c)) / (c - b), where J is the integral of G
    from 0. G(y) = (1 + sign(y) F(|y| step))/2, and the integral of F by parts is y F(y step) - m(y
    step)/step with the law's partial mean m. No quadrature is needed.
    """
    ends = np.linspace(0.0, 0.5, classes + 1)[:, None]
    y = k + 0.5 - ends
    size = np.abs(y)
    cdf, mean, _ = law.moments(np.minimum(size * step, 1.0))
    integral = (y + size * cdf - mean / step) / 2
    return (integral[:-1] - integral[1:]) * (2 * classes)
