"""What dithered quantisation sends: the law of its integers under each class of dither.

A coordinate of size t (in any unit) and random sign is sent as q = round(±t/step + a), where the
dither a is uniform in [0, 1/2): the sign is the dither's own (schemes/ecdq.py), so that whatever
the signs of the coordinates, the law of ±t is even. A class is one of ``classes`` equal parts of
[0, 1/2); receivers know it, so each class has a code book of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.probabilities import entropy_bits

# exp(-x**2/2)/sqrt(2 pi) has this differential entropy plus log2 of its deviation.
_GAUSS_BITS = 0.5 * np.log2(2 * np.pi * np.e)


def dithered_probabilities(law: Distribution, step: float, classes: int, most: int) -> Array:
    """P(q | class) for q = -most..most, then what is left for all others: (classes, 2 most + 2).

    law: of the sizes t in [0, 1], with an atom at zero or not; step > 0: in the same unit.
    """
    at_most = _at_most(law, step, classes, np.arange(-most - 1, most + 1))
    inside = np.maximum(np.diff(at_most, axis=1), 0.0)
    rest = np.maximum(1.0 - inside.sum(axis=1, keepdims=True), 0.0)
    return np.concatenate([inside, rest], axis=1)


def dithered_tail(law: Distribution, step: float, classes: int, most: ArrayLike) -> Array:
    """P(abs(q) > most | class): (classes, number of ``most``)."""
    most = np.asarray(most)
    above = _at_most(law, step, classes, most) - _at_most(law, step, classes, -most - 1)
    return np.maximum(1.0 - above, 0.0)


def _at_most(law: Distribution, step: float, classes: int, k: np.ndarray) -> Array:
    """P(q <= k | class): (classes, number of k).

    With G the distribution function of ±t/step and a in [b, c), P(q <= k | a) = G(k + 1/2 - a); its
    mean over the class is (J(k + 1/2 - b) - J(k + 1/2 - c)) / (c - b) with J the integral of G from
    0. G(y) = (1 + sign(y) F(|y| step))/2, and F integrates by parts to y F(y step) - m(y step)/step
    with m the law's partial mean: no quadrature is needed.
    """
    ends = np.linspace(0.0, 0.5, classes + 1)[:, None]
    y = k + 0.5 - ends
    size = np.abs(y)
    cdf, mean, _ = law.moments(np.minimum(size * step, 1.0))
    integral = (y + size * cdf - mean / step) / 2
    return (integral[:-1] - integral[1:]) * (2 * classes)


def dithered_entropy(law: Distribution, step: float, classes: int, most: int) -> float:
    """Bits per coordinate of ideal codes for q, one for each class; what lies outside counts as one
    symbol more."""
    return entropy_bits(dithered_probabilities(law, step, classes, most)) / classes


def rate_bound(delta: float) -> float:
    """Bits per coordinate that suffice for a step of ``delta`` root mean squares, whatever the law,
    where the code knows the dither: ½ log2(2πe (1/δ² + 1/12)).

    Zamir and Feder (1992): H(q | dither) is the mutual information between v and v + e with e
    uniform, independent and of variance δ²/12; v + e has variance 1 + δ²/12 at most, its
    differential entropy is a Gaussian's at most, and e's own is log2(δ).
    """
    return float(_GAUSS_BITS + 0.5 * np.log2(1 / delta**2 + 1 / 12))
