"""Bound descent with compressed gradients, with and without feedback (QCS paper, Lemmas 5 and 6).

f is L-smooth and starts at f(w0) - f* = ``initial_gap``; each gradient has E||g||² <= B. γ belongs
to an unbiased quantiser: E||z - Q(z)||² <= γ ||z||². "mmse" quantisers send Q(z)/(γ + 1). The
bounds apply to the mean of E||∇f(w_t)||² over the T iterates, and so also to the minimum.
"""

from __future__ import annotations

from hvd_adaptive.base.checks import check_choice
from hvd_adaptive.theory.arguments import check_count, check_not_negative, check_positive


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

    The last term of the printed Lemma 6 is four times as large. ``residual`` is η with E||r||² <= η
    B (``residual_bound``). Since r' = r + g - ẑ, the points w - μ r descend by g itself, and -<∇f(w
    - μ r), ∇f(w)> <= -||∇f(w)||²/2 + L² μ² ||r||²/2.
    """
    steps = check_count("iterations", iterations)
    rate = check_positive("step_size", step_size)
    curvature = check_positive("smoothness", smoothness)
    gap = check_not_negative("initial_gap", initial_gap)
    moment = check_positive("second_moment", second_moment)
    eta = check_not_negative("residual", residual)
    return 2 * gap / (steps * rate) + curvature * moment * (rate + curvature * eta * rate**2)
