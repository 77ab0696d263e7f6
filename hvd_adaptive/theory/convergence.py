"""Evaluate the papers' convergence theorems for quantized data-parallel SGD.

Every theorem is the classical one for plain SGD, applied to the variance of the average of M
quantized stochastic gradients (``quantized_variance``). Arguments are named after the assumptions:

    smoothness      L of QSGD, beta of NUQSGD and ALQ: ||grad f(x) - grad f(y)|| <= L ||x - y||
    radius          R with ||w - w0|| <= R for all w of the convex set Omega onto which SGD is
                    projected (ALQ Theorem 4); only the distance from w0 to a minimiser matters
    second_moment   B with E||g(w)||^2 <= B
    variance        sigma^2 with E||g(w) - grad f(w)||^2 <= sigma^2; B if it is unknown
    epsilon         epsilon_Q, of one table or averaged (``RunAverages``): constant step sizes
                    weigh all iterations equally, so the average is sufficient
    processors      M (K in QSGD); their gradients and roundings are independent
    bits            N_Q, expected bits per iteration and processor
    gradient_bound  V with ||grad f(w)|| <= V
    initial_gap     f(w0) - f*, or an upper bound of it
    lookahead       l >= 0

With momentum 0 <= mu < 1 (ALQ App. I, after Yang, Lin and Li 2016), the update (Eq. 45) with the
averaged quantized gradient g,

    y_{t+1} = w_t - alpha g,   y'_{t+1} = w_t - l alpha g,
    w_{t+1} = y_{t+1} + mu (y'_{t+1} - y'_t)

is the heavy ball at lookahead l = 0 (torch's SGD with momentum at a constant step size), Nesterov's
method at l = 1 and plain SGD with step size alpha/(1 - mu) at l = 1/(1 - mu). Both proofs follow
z_t = w_t + mu/(1 - mu) (w_t - w_{t-1} + l alpha g_{t-1}), which plain SGD with alpha/(1 - mu)
moves.

The bounds hold in expectation over gradients and rounding, in the unit of f (or of ||grad f||^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hvd_adaptive.theory.arguments import check_count, check_not_negative, check_positive


@dataclass(frozen=True)
class Guarantee:
    """Result of a convergence theorem.

    Attributes:
        bound: Upper bound that holds after ``iterations`` at ``step_size``.
        step_size: Step size for which the bound holds.
        iterations: Number of iterations T.
        total_bits: Bits that one processor sends in the whole run; None if ``bits`` was not given.
    """

    bound: float
    step_size: float
    iterations: int
    total_bits: float | None = None


def quantized_variance(
    second_moment: float, epsilon: float, processors: int = 1, variance: float | None = None
) -> float:
    """Return (sigma^2 + epsilon_Q B) / M, the variance of the average of M quantized gradients.

    Rounding is unbiased given g, so E||Q(g) - grad f||^2 = E||g - grad f||^2 + E||Q(g) - g||^2. If
    ``variance`` is None, sigma^2 = B, which gives ALQ's (1 + epsilon_Q) B / M.
    """
    moment = check_not_negative("second_moment", second_moment)
    own = moment if variance is None else check_not_negative("variance", variance)
    added = check_not_negative("epsilon", epsilon) * moment
    return (own + added) / check_count("processors", processors)


def nonsmooth_convex(
    *,
    iterations: int,
    radius: float,
    second_moment: float,
    epsilon: float = 0.0,
    processors: int = 1,
    step_size: float | None = None,
    bits: float | None = None,
) -> Guarantee:
    """Bound E f(mean of w_0 .. w_{T-1}) - f*: ALQ Theorem 4, corrected.

    The bound is R^2/(2 alpha T) + alpha G^2/2. G^2 = B (1 + epsilon_Q/M) bounds the second moment
    of the averaged gradient, since E||mean||^2 = ||grad||^2 + (variances)/M <= (1 - 1/M) B + (1 +
    epsilon_Q) B/M. The default step size is alpha = R/(G sqrt(T)), which gives R G/sqrt(T).
    """
    steps, r = check_count("iterations", iterations), check_positive("radius", radius)
    moment = check_positive("second_moment", second_moment)
    epsilon = check_not_negative("epsilon", epsilon)
    g_squared = moment * (1 + epsilon / check_count("processors", processors))
    alpha = r / math.sqrt(g_squared * steps) if step_size is None else step_size
    alpha = check_positive("step_size", alpha)
    bound = r**2 / (2 * alpha * steps) + alpha * g_squared / 2
    return Guarantee(bound, alpha, steps, total_bits(steps, bits))


def smooth_convex(
    *,
    iterations: int,
    smoothness: float,
    radius: float,
    second_moment: float,
    epsilon: float = 0.0,
    processors: int = 1,
    variance: float | None = None,
    step_size: float | None = None,
    bits: float | None = None,
) -> Guarantee:
    """Bound E f(mean of w_1 .. w_T) - f*: QSGD Theorem 3.4 and NUQSGD Theorem 4.

    The bound at the default step size is R sqrt(2 sigma_M^2/T) + L R^2/T, with epsilon and bits of
    the scheme and sigma_M^2 = ``quantized_variance`` (QSGD Theorem 2.1 and Corollary 2.2; NUQSGD
    Theorem 1 and Corollary 1). The default step size is the theorems' 1/(L + 1/gamma), gamma =
    (R/sigma_M) sqrt(2/T). If ``step_size``, below 1/L, is given, the bound is R^2/(2 alpha T) +
    gamma sigma_M^2/2 with 1/gamma = 1/alpha - L (Bubeck 2015, proof of Theorem 6.3). At the default
    step size this formula would give one half to three quarters of the returned bound: Bubeck's R^2
    is sup ||w - w0||^2 / 2, and QSGD's has no 1/2.
    """
    steps, r = check_count("iterations", iterations), check_positive("radius", radius)
    smooth = check_positive("smoothness", smoothness)
    noise = quantized_variance(second_moment, epsilon, processors, variance)
    if step_size is None:
        alpha = 1 / (smooth + math.sqrt(noise * steps / 2) / r)
        bound = r * math.sqrt(2 * noise / steps) + smooth * r**2 / steps
    else:
        alpha = check_positive("step_size", step_size, below=1 / smooth)
        gamma = 1 / (1 / alpha - smooth)
        bound = r**2 / (2 * alpha * steps) + gamma * noise / 2
    return Guarantee(bound, alpha, steps, total_bits(steps, bits))


def smooth_convex_to_reach(
    target: float,
    *,
    smoothness: float,
    radius: float,
    second_moment: float,
    epsilon: float = 0.0,
    processors: int = 1,
    variance: float | None = None,
    bits: float | None = None,
) -> Guarantee:
    """Return the fewest iterations whose ``smooth_convex`` bound is <= target, and their bits.

    QSGD Theorem 3.4 and NUQSGD Theorem 4 give T = O(R^2 max(2 sigma_M^2/target^2, L/target)). Here
    T includes the constants: it is derived from the root of L R^2 x^2 + R sqrt(2 sigma_M^2) x =
    target in x = 1/sqrt(T). NUQSGD Theorem 5 compares schemes by their total bits T N_Q (its
    formula is missing from the available text, and contains leading terms only). The total bits are
    None if ``bits`` is not given.
    """
    target = check_positive("target", target)
    smooth, r = check_positive("smoothness", smoothness), check_positive("radius", radius)
    noise = r * math.sqrt(2 * quantized_variance(second_moment, epsilon, processors, variance))
    root = (noise + math.sqrt(noise**2 + 4 * smooth * r**2 * target)) / (2 * target)
    known: Any = {"smoothness": smooth, "radius": r, "second_moment": second_moment}
    known |= {"epsilon": epsilon, "processors": processors, "variance": variance, "bits": bits}
    # Rounding may put the root on either side of a whole number.
    steps = max(1, math.ceil(root**2) - 1)
    while smooth_convex(iterations=steps, **known).bound > target:
        steps += 1
    return smooth_convex(iterations=steps, **known)


def smooth_nonconvex(
    *,
    iterations: int,
    smoothness: float,
    initial_gap: float,
    second_moment: float,
    epsilon: float = 0.0,
    processors: int = 1,
    variance: float | None = None,
    step_size: float | None = None,
    bits: float | None = None,
) -> Guarantee:
    """Bound E||grad f(w_R)||^2, R uniform on 0 .. T-1: ALQ Theorem 6, QSGD Theorem 3.5, corrected.

        (2 (f(w0) - f*)/T + L alpha^2 sigma_M^2) / (2 alpha - L alpha^2),   0 < alpha < 2/L

    (Ghadimi and Lan 2013, Theorem 2.1). The default step size is alpha = 1/L, which gives 2 L
    (f(w0) - f*)/T + sigma_M^2. ``initial_gap`` is f(w0) - f* or an upper bound of it.
    """
    steps = check_count("iterations", iterations)
    smooth = check_positive("smoothness", smoothness)
    gap = check_not_negative("initial_gap", initial_gap)
    noise = quantized_variance(second_moment, epsilon, processors, variance)
    alpha = 1 / smooth if step_size is None else step_size
    alpha = check_positive("step_size", alpha, below=2 / smooth)
    bound = (2 * gap / steps + smooth * alpha**2 * noise) / (alpha * (2 - smooth * alpha))
    return Guarantee(bound, alpha, steps, total_bits(steps, bits))


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

    ``distance`` is ||w0 - w*||.
    """
    count = check_count("iterations", iterations) + 1
    mu = check_not_negative("momentum", momentum, below=1.0)
    alpha = check_positive("step_size", step_size)
    gap = check_not_negative("initial_gap", initial_gap)
    squared = check_not_negative("distance", distance) ** 2
    moment = quantized_variance(second_moment, epsilon, processors, variance)
    moment += check_not_negative("gradient_bound", gradient_bound) ** 2
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

    at alpha = min((1 - mu)/(2 L), C/sqrt(T + 1)). ``step_constant`` is C > 0. The theorem holds for
    the mean over t as well.
    """
    count = check_count("iterations", iterations) + 1
    mu = check_not_negative("momentum", momentum, below=1.0)
    smooth = check_positive("smoothness", smoothness)
    c = check_positive("step_constant", step_constant)
    gap = check_not_negative("initial_gap", initial_gap)
    moment = quantized_variance(second_moment, epsilon, processors, variance)
    moment += check_not_negative("gradient_bound", gradient_bound) ** 2
    ahead = (1 - mu) * check_not_negative("lookahead", lookahead) - 1
    alpha = min((1 - mu) / (2 * smooth), c / math.sqrt(count))
    spread = smooth * (mu**2 * ahead**2 + (1 - mu) ** 2) * moment
    progress = 2 * (1 - mu) * gap / (alpha * count)
    bound = progress + c * spread / ((1 - mu) ** 3 * math.sqrt(count))
    return Guarantee(bound, alpha, count - 1, total_bits(count - 1, bits))


def total_bits(iterations: int, bits: float | None) -> float | None:
    """Return T N_Q, or None if N_Q is None."""
    return None if bits is None else iterations * check_not_negative("bits", bits)
