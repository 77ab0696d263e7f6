"""Compute the bounds that the papers prove: variance, code length, convexity, convergence.

Each docstring names the theorem; ``docs/theory.md`` has an example of each function, and lists the
errors of the printed theorems. Arguments and results are plain numbers and NumPy arrays.
"""

from hvd_adaptive.theory.code_length import code_length_bound as code_length_bound
from hvd_adaptive.theory.code_length import elias_bits as elias_bits
from hvd_adaptive.theory.code_length import nonzero_bound as nonzero_bound
from hvd_adaptive.theory.code_length import nuqsgd_code_length as nuqsgd_code_length
from hvd_adaptive.theory.code_length import qsgd_code_length as qsgd_code_length
from hvd_adaptive.theory.code_length import qsgd_dense_code_length as qsgd_dense_code_length
from hvd_adaptive.theory.code_length import sparse_code_bits as sparse_code_bits
from hvd_adaptive.theory.code_length import sparse_code_length_bound as sparse_code_length_bound
from hvd_adaptive.theory.convergence import Guarantee as Guarantee
from hvd_adaptive.theory.convergence import momentum_convex as momentum_convex
from hvd_adaptive.theory.convergence import momentum_nonconvex as momentum_nonconvex
from hvd_adaptive.theory.convergence import nonsmooth_convex as nonsmooth_convex
from hvd_adaptive.theory.convergence import quantized_variance as quantized_variance
from hvd_adaptive.theory.convergence import smooth_convex as smooth_convex
from hvd_adaptive.theory.convergence import smooth_convex_to_reach as smooth_convex_to_reach
from hvd_adaptive.theory.convergence import smooth_nonconvex as smooth_nonconvex
from hvd_adaptive.theory.convexity import best_single_level as best_single_level
from hvd_adaptive.theory.convexity import convexity_margin as convexity_margin
from hvd_adaptive.theory.convexity import least_convex_pair as least_convex_pair
from hvd_adaptive.theory.convexity import objective_hessian as objective_hessian
from hvd_adaptive.theory.convexity import variance_gap as variance_gap
from hvd_adaptive.theory.convexity import variance_gap_bound as variance_gap_bound
from hvd_adaptive.theory.feedback import best_feedback as best_feedback
from hvd_adaptive.theory.feedback import compressed_descent as compressed_descent
from hvd_adaptive.theory.feedback import feedback_descent as feedback_descent
from hvd_adaptive.theory.feedback import feedback_limit as feedback_limit
from hvd_adaptive.theory.feedback import mmse_error as mmse_error
from hvd_adaptive.theory.feedback import qcs_variance_bound as qcs_variance_bound
from hvd_adaptive.theory.feedback import residual_bound as residual_bound
from hvd_adaptive.theory.variance import RunAverages as RunAverages
from hvd_adaptive.theory.variance import Segment as Segment
from hvd_adaptive.theory.variance import exact_variance as exact_variance
from hvd_adaptive.theory.variance import exponent_constant as exponent_constant
from hvd_adaptive.theory.variance import nuqsgd_variance_bound as nuqsgd_variance_bound
from hvd_adaptive.theory.variance import qsgd_variance_bound as qsgd_variance_bound
from hvd_adaptive.theory.variance import small_coordinates as small_coordinates
from hvd_adaptive.theory.variance import variance_bound as variance_bound
