"""Fit exponentially spaced levels by gradient descent on their multiplier (AMQ)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_adaptive.levels.distributions import Array, Distribution
from hvd_adaptive.levels.histogram import tabulated
from hvd_adaptive.levels.magnitudes import exponential_magnitudes
from hvd_adaptive.levels.objective import expected_variance, gradient

# The least level, p**s, stays a normal float32, and so does its gap times 2**-24.
_LEAST = 2.0**-96
_LARGEST = 1 - 2.0**-12
# Distance of the starts in log(p / (1 - p)); number of best starts that descend; most steps each.
_SPACING, _DESCENTS, _STEPS = 0.025, 4, 200


@dataclass(frozen=True)
class MultiplierFit:
    """Fitted multiplier.

    Attributes:
        multiplier: p in (0, 1).
        magnitudes: ..., p, 1.
        objective: Psi(p).
        steps: Steps of the descent.
    """

    multiplier: float
    magnitudes: Array
    objective: float
    steps: int


def multiplier_gradient(
    multiplier: float, distribution: Distribution, count: int, symmetric: bool = True
) -> float:
    """Return dPsi/dp (ALQ Eqs 8, 38, App. C.3) in folded form.

    By the chain rule over the levels l_j = p**j, this is sum_j (dPsi/dl_j) j p**(j-1) with
    dPsi/dl_j of Eq. 30, or of Eq. 6 if the table is zero-based. The level 0 depends on no p. The
    least power l_s has no term 2 l_s F(l_s) then: coordinates in [0, l_s] are rounded to 0 or l_s
    at the cost r (l_s - r), whose derivative is r. The printed Eq. 8 is this sum written out (half
    of it, for an even density). App. C.3 prints half of Eq. 38's derivative.
    """
    powers = np.arange(count - 1, -1, -1.0)
    slopes = powers * np.power(multiplier, np.maximum(powers - 1, 0))
    magnitudes = exponential_magnitudes(count, multiplier, symmetric)
    return float(gradient(magnitudes, distribution, symmetric) @ slopes)


def fit_multiplier(
    distribution: Distribution, count: int, symmetric: bool = True, start: float = 0.5
) -> MultiplierFit:
    """Return the multiplier with the least expected variance (ALQ section 3.3, App. B.3.3).

    Psi(p) has several minima. Therefore descent runs from the best few of a grid of starts, which
    includes ``start``, and the best result is returned. Steps go against the sign of the derivative
    in log(p / (1 - p)), which keeps p inside (0, 1). They grow while the objective falls and are
    halved if it would rise.

    The levels 0 and 1 alone depend on no multiplier: a zero-based table of ``count`` 2 returns
    ``start``.
    """
    law = tabulated(distribution)
    powers = count - 1 if symmetric else count - 2
    if powers == 0:
        levels = np.array([0.0, 1.0])
        return MultiplierFit(start, levels, float(expected_variance(levels, law, False)), 0)
    least = max(_LEAST ** (1 / powers), 1e-4)
    rungs = np.arange(_logit(least), _logit(_LARGEST), _SPACING)
    starts = np.clip(np.append(1 / (1 + np.exp(-rungs)), start), least, _LARGEST)
    tables = np.stack([exponential_magnitudes(count, p, symmetric) for p in starts])
    ladder = starts[np.argsort(expected_variance(tables, law, symmetric))][:_DESCENTS]
    value, best, steps = min(_descend(float(p), law, count, symmetric, least) for p in ladder)
    return MultiplierFit(best, exponential_magnitudes(count, best, symmetric), value, steps)


def _descend(
    p: float, law: Distribution, count: int, symmetric: bool, least: float
) -> tuple[float, float, int]:
    """Return Psi(p), p and the number of steps at the end of a descent from p."""

    def objective(p: float) -> float:
        return float(expected_variance(exponential_magnitudes(count, p, symmetric), law, symmetric))

    value, size, steps = objective(p), _SPACING, 0
    while steps < _STEPS and size > 1e-6:
        steps += 1
        slope = multiplier_gradient(p, law, count, symmetric)
        odds = p / (1 - p) * np.exp(-np.sign(slope) * size)
        moved = float(np.clip(odds / (1 + odds), least, _LARGEST))
        lower = objective(moved)
        if lower < value:
            p, value, size = moved, lower, 1.2 * size
        else:
            size /= 2
    return value, p, steps


def _logit(p: float) -> float:
    return float(np.log(p / (1 - p)))
