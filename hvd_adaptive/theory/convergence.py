"""What quantized data-parallel SGD is promised to reach: the papers' theorems as calculators.

Every theorem is the classical one for plain SGD, fed with the variance of the average of M
quantized stochastic gradients (``quantized_variance``). Names follow the assumptions:

    smoothness      L of QSGD, beta of NUQSGD and ALQ: ||grad f(x) - grad f(y)|| <= L ||x - y||
    radius          R with ||w - w0|| <= R for all w of the convex set Omega that SGD is projected
                    to (ALQ Theorem 4); only the distance from w0 to a minimiser enters
    second_moment   B with E||g(w)||^2 <= B
    variance        sigma^2 with E||g(w) - grad f(w)||^2 <= sigma^2; B where it is not known
    epsilon         epsilon_Q, of one table or averaged (``RunAverages``): constant step sizes
                    weigh all iterations alike, so the average is enough
    processors      M (K in QSGD), their gradients and roundings independent
    bits            N_Q, expected bits per iteration and processor

The bounds hold in expectation over gradients and rounding, in the unit of f (or of ||grad f||^2).
Each is derived in its docstring's terms; where the print is wrong, so it says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_adaptive.theory.arguments import check_count, check_not_negative, check_positive


@dataclass(frozen=True)
class Guarantee:
    """bound: what holds after ``iterations`` at ``step_size``; total_bits: of one processor."""

    bound: float
    step_size: float
    iterations: int
    total_bits: float | None = None


def quantized_variance(
    second_moment: float, epsilon: float, processors: int = 1, variance: float | None = None
) -> float:
    """(sigma^2 + epsilon_Q B) / M: variance of the average of M quantized stochastic gradients.

    Rounding is unbiased given g, so E||Q(g) - grad f||^2 = E||g - grad f||^2 + E||Q(g) - g||^2.
    Without ``variance`` sigma^2 = B, ALQ's (1 + epsilon_Q) B / M. QSGD Theorems 3.2, 3.4, 3.5 and
    the text below ALQ's and NUQSGD's Theorem 2 print epsilon_Q B and so lose the gradients' own
    variance: with many levels their bounds would beat full precision.
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
    """E f(mean of w_0 .. w_{T-1}) - f* <= R^2/(2 alpha T) + alpha G^2/2: ALQ Theorem 4, mended.

    G^2 = B (1 + epsilon_Q/M) bounds the second moment of the averaged gradient, since
    E||mean||^2 = ||grad||^2 + (variances)/M <= (1 - 1/M) B + (1 + epsilon_Q) B/M. By default
    alpha = R/(G sqrt(T)), which gives R G/sqrt(T).

    The print has alpha = R M/(B' sqrt(T)) and R B'/(M sqrt(T)), B' = (1 + epsilon_Q) B: a second
    moment where its root belongs, and divided by M although only the variance falls with M. It
    fails for exact gradients on many processors.
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
    """E f(mean of w_1 .. w_T) - f* <= R sqrt(2 sigma_M^2/T) + L R^2/T, at the default step.

    QSGD Theorem 3.4 (Theorem 2.1, Corollary 2.2) and NUQSGD Theorem 4 (Theorem 1, Corollary 1),
    with epsilon and bits of the scheme; sigma_M^2 = ``quantized_variance``. The default step is
    the theorems' 1/(L + 1/gamma), gamma = (R/sigma_M) sqrt(2/T). Where a step below 1/L is given,
    the bound is R^2/(2 alpha T) + gamma sigma_M^2/2, 1/gamma = 1/alpha - L (Bubeck 2015, proof of
    Theorem 6.3). At the default step that would be less, half to three quarters: Bubeck's R^2 is
    sup ||w - w0||^2 / 2, QSGD's has no 1/2.

    Slips: the print's step for K processors, 1/(L + sqrt(K)/gamma), needs 1/(L + 1/(sqrt(K)
    gamma)), as sigma/sqrt(K) is what gamma divides by; its sigma = B' is a variance, not a root.
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
    """The fewest iterations whose ``smooth_convex`` bound is <= target, and their total bits.

    QSGD Theorem 3.4's and NUQSGD Theorem 4's T = O(R^2 max(2 sigma_M^2/target^2, L/target)) with
    its constants: the root of L R^2 x^2 + R sqrt(2 sigma_M^2) x = target in x = 1/sqrt(T). Total
    bits T N_Q are what NUQSGD Theorem 5 compares between schemes (its formula is missing in our
    text, and kept to leading terms there); bits are needed for them.
    """
    target = check_positive("target", target)
    smooth, r = check_positive("smoothness", smoothness), check_positive("radius", radius)
    noise = r * math.sqrt(2 * quantized_variance(second_moment, epsilon, processors, variance))
    root = (noise + math.sqrt(noise**2 + 4 * smooth * r**2 * target)) / (2 * target)

    def after(steps: int) -> Guarantee:
        return smooth_convex(
            iterations=steps,
            smoothness=smooth,
            radius=r,
            second_moment=second_moment,
            epsilon=epsilon,
            processors=processors,
            variance=variance,
            bits=bits,
        )

    # Rounding may put the root on either side of a whole number.
    steps = max(1, math.ceil(root**2) - 1)
    while after(steps).bound > target:
        steps += 1
    return after(steps)


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
    """E||grad f(w_R)||^2 for R uniform on 0 .. T-1: ALQ Theorem 6, QSGD Theorem 3.5, mended.

        (2 (f(w0) - f*)/T + L alpha^2 sigma_M^2) / (2 alpha - L alpha^2),   0 < alpha < 2/L

    (Ghadimi and Lan 2013, Theorem 2.1), by default at alpha = 1/L: 2 L (f(w0) - f*)/T + sigma_M^2.
    initial_gap: f(w0) - f*, or more.

    ALQ prints L (f(w0) - f*)/T + 2 (1 + epsilon_Q) B/M for every alpha < 2/L. No bound can do
    without alpha, since alpha -> 0 stands still, and its first term is half of the least that any
    alpha gives. QSGD's first term, sqrt(L (f(x1) - f*))/N, has the wrong unit, and its second
    lacks the gradients' own variance.
    """
    steps = check_count("iterations", iterations)
    smooth = check_positive("smoothness", smoothness)
    gap = check_not_negative("initial_gap", initial_gap)
    noise = quantized_variance(second_moment, epsilon, processors, variance)
    alpha = 1 / smooth if step_size is None else step_size
    alpha = check_positive("step_size", alpha, below=2 / smooth)
    bound = (2 * gap / steps + smooth * alpha**2 * noise) / (alpha * (2 - smooth * alpha))
    return Guarantee(bound, alpha, steps, total_bits(steps, bits))


def total_bits(iterations: int, bits: float | None) -> float | None:
    """T N_Q, or None where N_Q is not given."""
    return None if bits is None else iterations * check_not_negative("bits", bits)
