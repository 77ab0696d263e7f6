"""Compute the bounds that the papers prove: variance, code length, convexity, convergence.

Each docstring names the theorem and the errors of its printed form. ``docs/theory.md`` has an
example of each function. Arguments and results are plain numbers and NumPy arrays.
"""

from hvd_adaptive.theory.averages import RunAverages, Segment
from hvd_adaptive.theory.code_length import (
    code_length_bound,
    elias_bits,
    nonzero_bound,
    nuqsgd_code_length,
    qsgd_code_length,
    qsgd_dense_code_length,
    sparse_code_bits,
    sparse_code_length_bound,
)
from hvd_adaptive.theory.convergence import (
    Guarantee,
    nonsmooth_convex,
    quantized_variance,
    smooth_convex,
    smooth_convex_to_reach,
    smooth_nonconvex,
)
from hvd_adaptive.theory.convexity import (
    best_single_level,
    convexity_margin,
    least_convex_pair,
    objective_hessian,
    variance_gap,
    variance_gap_bound,
)
from hvd_adaptive.theory.descent import compressed_descent, feedback_descent
from hvd_adaptive.theory.feedback import (
    best_feedback,
    feedback_limit,
    mmse_error,
    qcs_variance_bound,
    residual_bound,
)
from hvd_adaptive.theory.momentum import momentum_convex, momentum_nonconvex
from hvd_adaptive.theory.variance import (
    exact_variance,
    exponent_constant,
    nuqsgd_variance_bound,
    qsgd_variance_bound,
    small_coordinates,
    variance_bound,
)

__all__ = [
    "Guarantee",
    "RunAverages",
    "Segment",
    "best_feedback",
    "best_single_level",
    "code_length_bound",
    "compressed_descent",
    "convexity_margin",
    "elias_bits",
    "exact_variance",
    "exponent_constant",
    "feedback_descent",
    "feedback_limit",
    "least_convex_pair",
    "mmse_error",
    "momentum_convex",
    "momentum_nonconvex",
    "nonsmooth_convex",
    "nonzero_bound",
    "nuqsgd_code_length",
    "nuqsgd_variance_bound",
    "objective_hessian",
    "qcs_variance_bound",
    "qsgd_code_length",
    "qsgd_dense_code_length",
    "qsgd_variance_bound",
    "quantized_variance",
    "residual_bound",
    "small_coordinates",
    "smooth_convex",
    "smooth_convex_to_reach",
    "smooth_nonconvex",
    "sparse_code_bits",
    "sparse_code_length_bound",
    "variance_bound",
    "variance_gap",
    "variance_gap_bound",
]
