"""What weighted error feedback is worth: the QCS paper's Lemmas 3 and 4 (Abdi and Fekri 2020).

γ is an unbiased quantiser's: E Q(z) = z and E||z - Q(z)||² <= γ ||z||² for every z; QCS's is
``qcs_variance_bound`` (Theorem 2, Eq. 10). "mmse" quantisers send α Q(z), α = 1/(γ + 1) (Eq. 12).

With z = g + β r and e = z - ẑ the residual becomes r' = (1 - β) r + e (Eq. 14d). Gradients have
E||g||² <= B, and bounds η promise E||r||² <= η B at every step from r = 0 on: each step maps
E||r||² by an increasing function whose fixed point is η B.
"""

from __future__ import annotations

import math

from hvd_adaptive.schemes.qcs import variance_bound as qcs_variance_bound
from hvd_adaptive.settings import check_choice, check_flag
from hvd_adaptive.theory.arguments import check_not_negative, check_positive

__all__ = [
    "best_feedback",
    "feedback_limit",
    "mmse_error",
    "qcs_variance_bound",
    "residual_bound",
]


def mmse_error(gamma: float) -> float:
    """γ/(γ + 1): E||z - α Q(z)||² <= this times ||z||², at α = 1/(γ + 1) (Lemma 3, Eq. 13).

    The error is (1 - α) z + α (z - Q(z)), whose parts are uncorrelated: at most (1 - α)² + α² γ,
    least at this α, where it is 1 - α.
    """
    gamma = check_not_negative("gamma", gamma)
    return gamma / (gamma + 1)


def feedback_limit(gamma: float, estimator: str = "unbiased") -> float:
    """β from which on no bound holds: 2/(1 + γ) for unbiased quantisers, 2 for "mmse".

    Unbiased: (1 - β)² + β² γ, which multiplies E||r||² in each step, must be below 1. That is
    exact where the error is γ ||z||², not just bounded by it: then the residual diverges from
    here on. The package takes β up to 1, the paper's range, since nothing beyond it is of use.
    """
    gamma = check_not_negative("gamma", gamma)
    limits = {"unbiased": 2 / (1 + gamma), "mmse": 2.0}
    return limits[check_choice("estimator", estimator, limits)]


def residual_bound(
    gamma: float, weight: float, estimator: str = "unbiased", correlated: bool = True
) -> float:
    """η of Lemma 4: E||r||² <= η B at every step. Infinite from ``feedback_limit`` on.

    weight: β, above 0.
    correlated: False where E<g, r> = 0, as for gradients that do not depend on the quantiser's
        random numbers; for "mmse", whose residual is not zero in the mean, they must be zero in the
        mean, too. In training gradients do depend on what was sent before: True bounds E<g, r> by
        Cauchy and Schwarz.

    The paper assumes E<g, r> = 0 for Eq. 15 (unbiased), without a word, and not for Eq. 16 (mmse).
    With c = (1 - β)² and R = E||r||² a step gives at most

    - unbiased: c R + γ E||z||², as E<r, e> = 0. Uncorrelated: γ/(1 - c - β² γ) (Eq. 15);
      correlated, E||z||² <= (√B + β √R)²: γ/(√(1 - c) - β √γ)², which the paper does not have.
    - mmse: c R + 2 (1 - β) E<r, e> + ρ E||z||², ρ = γ/(γ + 1), and E<r, e> = ρ E<r, z>: in all
      (1 - ρ) c R + ρ E||g + r||². Correlated: γ/(√(γ + 1 - c) - √γ)² (Eq. 16); uncorrelated:
      γ/(1 - c), which the paper does not have.
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
    """(β*, η*): the weight of the least ``residual_bound``, and that bound (Eqs 17, 18).

    - unbiased, uncorrelated: β* = 1/(γ + 1), η* = γ (γ + 1) (Eq. 17); correlated:
      β* = 1 - √(γ/(γ + 1)), from √(1 - c) - β √γ = sin t - √γ (1 - cos t) with β = 1 - cos t.
    - mmse: β* = 1; correlated: η* = γ/(√(γ + 1) - √γ)² (Eq. 18), uncorrelated: γ.

    Remark 2 finds unbiased feedback better because η* of Eq. 17 is below that of Eq. 18. That
    compares the two assumptions, not the estimators: under the same one the two are equal
    (correlated) or mmse's is less, γ against γ (γ + 1).
    """
    gamma = check_not_negative("gamma", gamma)
    weights = {
        ("unbiased", False): 1 / (gamma + 1),
        ("unbiased", True): 1 - math.sqrt(gamma / (gamma + 1)),
        ("mmse", False): 1.0,
        ("mmse", True): 1.0,
    }
    check_choice("estimator", estimator, ("unbiased", "mmse"))
    weight = weights[estimator, check_flag("correlated", correlated)]
    return weight, residual_bound(gamma, weight, estimator, correlated)
