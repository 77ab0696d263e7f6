"""Bound the convergence of quantized SGD with momentum: ALQ App. I, after Yang, Lin and Li (2016).

The update (Eq. 45) with the averaged quantized gradient g and momentum 0 <= mu < 1,

    y_{t+1} = w_t - alpha g,   y'_{t+1} = w_t - l alpha g,
    w_{t+1} = y_{t+1} + mu (y'_{t+1} - y'_t)

is the heavy ball at l = 0 (torch's SGD with momentum at a constant step size), Nesterov's method at
l = 1 and plain SGD with step size alpha/(1 - mu) at l = 1/(1 - mu). Both proofs follow z_t = w_t +
mu/(1 - mu) (w_t - w_{t-1} + l alpha g_{t-1}), which plain SGD with alpha/(1 - mu) moves. Arguments
are those of ``convergence``, and

    gradient_bound  V with ||grad f(w)|| <= V
    initial_gap     f(w0) - f*
    lookahead       l >= 0
"""

from __future__ import annotations

import math

from hvd_adaptive.theory.arguments import check_count, check_not_negative, check_positive
from hvd_adaptive.theory.convergence import Guarantee, quantized_variance, total_bits


def momentum_convex(
    *,
    iterations: int,
    momentum: float,
    step_size: float,
    distance: float,
    initial_gap: float,
    gradient_bound: float,
    second_moment: float,
    epsilon: float = 0.0,
    processors: int = 1,
    variance: float | None = None,
    lookahead: float = 0.0,
    bits: float | None = None,
) -> Guarantee:
    """Bound E f(mean of w_0 .. w_T) - f* without projection: ALQ Theorem 7, Eq. 46.

        mu (f(w0) - f*)/((1 - mu)(T + 1)) + (1 - mu) ||w0 - w*||^2/(2 alpha (T + 1))
            + alpha (1 + 2 l mu)(V^2 + sigma_M^2)/(2 (1 - mu))

    ``distance`` is ||w0 - w*||. The paper prints the sum of the T + 1 iterates divided by T.
    """
    count = check_count("iterations", iterations) + 1
    mu = check_not_negative("momentum", momentum, below=1.0)
    alpha = check_positive("step_size", step_size)
    gap = check_not_negative("initial_gap", initial_gap)
    squared = check_not_negative("distance", distance) ** 2
    moment = _moment(gradient_bound, second_moment, epsilon, processors, variance)
    ahead = 1 + 2 * check_not_negative("lookahead", lookahead) * mu
    bound = (
        mu * gap / ((1 - mu) * count)
        + (1 - mu) * squared / (2 * alpha * count)
        + alpha * ahead * moment / (2 * (1 - mu))
    )
    return Guarantee(bound, alpha, count - 1, total_bits(count - 1, bits))


def momentum_nonconvex(
    *,
    iterations: int,
    momentum: float,
    smoothness: float,
    step_constant: float,
    initial_gap: float,
    gradient_bound: float,
    second_moment: float,
    epsilon: float = 0.0,
    processors: int = 1,
    variance: float | None = None,
    lookahead: float = 0.0,
    bits: float | None = None,
) -> Guarantee:
    """Bound min over t = 0 .. T of E||grad f(w_t)||^2: ALQ Theorem 8.

        2 (1 - mu)(f(w0) - f*)/(alpha (T + 1)) + C V'/((1 - mu)^3 sqrt(T + 1))
        V' = L (mu^2 ((1 - mu) l - 1)^2 + (1 - mu)^2)(V^2 + sigma_M^2)

    at alpha = min((1 - mu)/(2 L), C/sqrt(T + 1)). ``step_constant`` is C > 0. The theorem holds as
    printed, and for the mean over t as well.
    """
    count = check_count("iterations", iterations) + 1
    mu = check_not_negative("momentum", momentum, below=1.0)
    smooth = check_positive("smoothness", smoothness)
    c = check_positive("step_constant", step_constant)
    gap = check_not_negative("initial_gap", initial_gap)
    moment = _moment(gradient_bound, second_moment, epsilon, processors, variance)
    ahead = (1 - mu) * check_not_negative("lookahead", lookahead) - 1
    alpha = min((1 - mu) / (2 * smooth), c / math.sqrt(count))
    spread = smooth * (mu**2 * ahead**2 + (1 - mu) ** 2) * moment
    progress = 2 * (1 - mu) * gap / (alpha * count)
    bound = progress + c * spread / ((1 - mu) ** 3 * math.sqrt(count))
    return Guarantee(bound, alpha, count - 1, total_bits(count - 1, bits))


def _moment(
    gradient_bound: float,
    second_moment: float,
    epsilon: float,
    processors: int,
    variance: float | None,
) -> float:
    """Return V^2 + sigma_M^2, the second moment of the averaged gradient."""
    exact = check_not_negative("gradient_bound", gradient_bound) ** 2
    return exact + quantized_variance(second_moment, epsilon, processors, variance)
