"""Bound the residual of weighted error feedback, and descent with and without it (QCS paper, Lemmas
3 to 6; Abdi and Fekri 2020).

γ belongs to an unbiased quantiser: E Q(z) = z and E||z - Q(z)||² <= γ ||z||² for every z. QCS's γ
is ``qcs_variance_bound`` (Theorem 2, Eq. 10). "mmse" quantisers send α Q(z), α = 1/(γ + 1) (Eq.
12). ``weight`` is β, above 0.

With z = g + β r and e = z - ẑ the residual becomes r' = (1 - β) r + e (Eq. 14d). Gradients have
E||g||² <= B. A bound η means E||r||² <= η B at every step, starting at r = 0: each step maps
E||r||² by an increasing function whose fixed point is η B.

In the bounds of descent f is L-smooth and starts at f(w0) - f* = ``initial_gap``. They apply to the
mean of E||∇f(w_t)||² over the T iterates, and so also to the minimum.
"""

from __future__ import annotations

import math

from hvd_adaptive.base.checks import check_choice, check_flag
from hvd_adaptive.schemes import qcs
from hvd_adaptive.theory.arguments import check_count, check_not_negative, check_positive


def qcs_variance_bound(order: int, measurements: int, quantizer_range: float) -> float:
    """Return γ of Eq. 10: E||ĝ - g||² <= γ ||g||² for unbiased QCS and any partition g.

    ``order`` is n, coordinates of a partition; ``measurements`` k, 1 to n; ``quantizer_range`` Q,
    including 1/2. For the derivation see ``schemes.qcs.variance_bound``.
    """
    n, k = check_count("order", order), check_count("measurements", measurements)
    if k > n:
        raise ValueError(f"measurements={k}: must be at most order={n}")
    return qcs.variance_bound(n, k, check_positive("quantizer_range", quantizer_range))


def mmse_error(gamma: float) -> float:
    """Return γ/(γ + 1), the relative error E||z - α Q(z)||² / ||z||² at α = 1/(γ + 1) at most.

    Source: Lemma 3, Eq. 13. The error is (1 - α) z + α (z - Q(z)), whose parts are uncorrelated.
    Its square is at most (1 - α)² + α² γ, which is least at this α and equals 1 - α there.
    """
    gamma = check_not_negative("gamma", gamma)
    return gamma / (gamma + 1)


def feedback_limit(gamma: float, estimator: str = "unbiased") -> float:
    """Return the β from which no bound exists: 2/(1 + γ) for unbiased quantisers, 2 for "mmse".

    For unbiased quantisers each step multiplies E||r||² by (1 - β)² + β² γ, which must be below 1.
    The limit is exact if the error is equal to γ ||z||², not only bounded by it: the residual then
    diverges for β at or above the limit. The package allows β up to 1, the paper's range; larger
    values have no use.
    """
    gamma = check_not_negative("gamma", gamma)
    limits = {"unbiased": 2 / (1 + gamma), "mmse": 2.0}
    return limits[check_choice("estimator", estimator, limits)]


def residual_bound(
    gamma: float, weight: float, estimator: str = "unbiased", correlated: bool = True
) -> float:
    """Return η of Lemma 4, E||r||² <= η B at every step; infinity from ``feedback_limit`` on.

    ``gamma`` is γ >= 0 of the quantiser, ``estimator`` "unbiased" or "mmse".
    ``correlated=False`` assumes E<g, r> = 0, which holds for gradients that do not depend on the
    quantiser's random numbers. For "mmse", whose residual has a nonzero mean, the gradients must
    also have zero mean. In training, gradients do depend on what was sent before: True bounds
    E<g, r> by the Cauchy-Schwarz inequality.

    With c = (1 - β)² and R = E||r||², one step gives at most

    - unbiased: c R + γ E||z||², since E<r, e> = 0. Uncorrelated: γ/(1 - c - β² γ) (Eq. 15).
      Correlated: E||z||² <= (√B + β √R)² gives γ/(√(1 - c) - β √γ)², which is not in the paper.
    - mmse: c R + 2 (1 - β) E<r, e> + ρ E||z||² with ρ = γ/(γ + 1) and E<r, e> = ρ E<r, z>, in total
      (1 - ρ) c R + ρ E||g + r||². Correlated: γ/(√(γ + 1 - c) - √γ)² (Eq. 16). Uncorrelated: γ/(1 -
      c), which is not in the paper.
    """
    gamma = check_not_negative("gamma", gamma)
    beta = check_positive("weight", weight)
    if beta >= feedback_limit(gamma, estimator):
        return math.inf
    kept = beta * (2 - beta)  # 1 - c
    bounds = {
        ("unbiased", False): kept - beta**2 * gamma,
        ("unbiased", True): (math.sqrt(kept) - beta * math.sqrt(gamma)) ** 2,
        ("mmse", False): kept,
        ("mmse", True): (kept / (math.sqrt(gamma + kept) + math.sqrt(gamma))) ** 2,
    }
    return gamma / bounds[estimator, check_flag("correlated", correlated)]


def best_feedback(
    gamma: float, estimator: str = "unbiased", correlated: bool = True
) -> tuple[float, float]:
    """Return (β*, η*): the weight with the least ``residual_bound``, and that bound (Eqs 17, 18).

    - unbiased, uncorrelated: β* = 1/(γ + 1), η* = γ (γ + 1) (Eq. 17). Correlated: β* = 1 - √(γ/(γ +
      1)), from √(1 - c) - β √γ = sin t - √γ (1 - cos t) with β = 1 - cos t.
    - mmse: β* = 1. Correlated: η* = γ/(√(γ + 1) - √γ)² (Eq. 18), which is that of unbiased
      quantisers, too. Uncorrelated: η* = γ.
    """
    gamma = check_not_negative("gamma", gamma)
    weight, correlated = 1.0, check_flag("correlated", correlated)
    if check_choice("estimator", estimator, ("unbiased", "mmse")) == "unbiased":
        weight = 1 - math.sqrt(gamma / (gamma + 1)) if correlated else 1 / (gamma + 1)
    return weight, residual_bound(gamma, weight, estimator, correlated)


def compressed_descent(
    *,
    iterations: int,
    step_size: float,
    smoothness: float,
    initial_gap: float,
    second_moment: float,
    gamma: float,
    estimator: str = "unbiased",
) -> float:
    """Return the bound without feedback: gap/(T μ) + L μ (1 + γ) B/2 (Lemma 5; Eq. 22 at μ = 1/√T).

    "mmse" is the unbiased quantiser at step size μ/(1 + γ): (1 + γ) gap/(T μ) + L μ B/2.
    """
    steps = check_count("iterations", iterations)
    rate = check_positive("step_size", step_size)
    gamma = check_not_negative("gamma", gamma)
    if check_choice("estimator", estimator, ("unbiased", "mmse")) == "mmse":
        rate /= 1 + gamma
    curvature = check_positive("smoothness", smoothness)
    gap = check_not_negative("initial_gap", initial_gap)
    moment = check_positive("second_moment", second_moment)
    return gap / (steps * rate) + curvature * rate * (1 + gamma) * moment / 2


def feedback_descent(
    *,
    iterations: int,
    step_size: float,
    smoothness: float,
    initial_gap: float,
    second_moment: float,
    residual: float,
) -> float:
    """Return the bound with feedback: 2 gap/(T μ) + L B (μ + L η μ²).

    This is Lemma 6 with a fourth of the printed last term. ``residual`` is η with E||r||² <= η B
    (``residual_bound``). Since r' = r + g - ẑ, the points w - μ r descend by g itself, and -<∇f(w -
    μ r), ∇f(w)> <= -||∇f(w)||²/2 + L² μ² ||r||²/2.
    """
    steps = check_count("iterations", iterations)
    rate = check_positive("step_size", step_size)
    curvature = check_positive("smoothness", smoothness)
    gap = check_not_negative("initial_gap", initial_gap)
    moment = check_positive("second_moment", second_moment)
    eta = check_not_negative("residual", residual)
    return 2 * gap / (steps * rate) + curvature * moment * (rate + curvature * eta * rate**2)
