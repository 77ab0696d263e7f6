"""Minimise the expected variance by projection-free gradient descent (ALQ Eqs 7 and 36: ALQG)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hvd_adaptive.levels.coordinate_descent import Descent
from hvd_adaptive.levels.distributions import Distribution
from hvd_adaptive.levels.magnitudes import check_magnitudes, separated
from hvd_adaptive.levels.objective import curvature_bound, expected_variance, gradient

# Largest move, as a share of the distance to the nearest neighbour. At the paper's 1/2, two
# neighbours that move towards each other would collide.
_SHARE = 0.49


def gradient_descent(
    magnitudes: ArrayLike,
    distribution: Distribution,
    symmetric: bool,
    tolerance: float = 1e-5,
    max_sweeps: int = 400,
) -> Descent:
    """Minimise Psi from each row of magnitudes (..., K) by ALQ Eq. 7.

    Each level moves against its derivative by at most (just under) half the distance to its nearest
    neighbour. So the levels never cross, and no projection is needed.

    The step size of a level is eta = 1 / ``curvature_bound``. A common eta, as printed, is not
    usable: curvatures differ by many orders of magnitude between the bulk and the tail. This Jacobi
    step cannot overshoot a quadratic. Backtracking covers other objectives: a row whose objective
    would rise keeps its levels and halves its steps, and doubles them again after a success.

    The arguments and the result are those of ``coordinate_descent``.
    """
    levels = separated(check_magnitudes(magnitudes, symmetric), symmetric)
    history = [np.asarray(expected_variance(levels, distribution, symmetric))]
    scale = np.ones(levels.shape[:-1])
    converged = np.zeros(levels.shape[:-1], dtype=bool)
    while len(history) <= max_sweeps and not converged.all():
        slope = gradient(levels, distribution, symmetric)
        bound = curvature_bound(levels, distribution, symmetric)
        step = np.divide(slope, bound, out=np.zeros_like(slope), where=bound > 0)
        gaps = np.diff(levels, prepend=-levels[..., :1] if symmetric else -1.0, append=np.inf)
        limit = _SHARE * np.minimum(gaps[..., :-1], gaps[..., 1:])
        step = np.clip(scale[..., None] * step, -limit, limit)
        moved = separated(levels - step, symmetric)
        value = np.asarray(expected_variance(moved, distribution, symmetric))
        better = value <= history[-1]
        levels = np.where(better[..., None], moved, levels)
        history.append(np.where(better, value, history[-1]))
        gain = history[-2] - history[-1]
        small = better & (scale >= 1) & (gain <= tolerance * history[-2])
        # A row that finds no better point even with tiny steps is at its minimum, up to rounding.
        converged = small | (scale < 1e-6)
        scale = np.where(better, np.minimum(2 * scale, 1.0), scale / 2)
    return Descent(levels, np.array(history), converged)
