"""Define level tables: laws of coordinates, the objective, and solvers."""

from hvd_adaptive.levels.averaged import averaged_law
from hvd_adaptive.levels.coordinate_descent import (
    Descent,
    best_level,
    coordinate_descent,
    first_level,
)
from hvd_adaptive.levels.distributions import Distribution
from hvd_adaptive.levels.fit import (
    SOLVERS,
    STARTS,
    FitError,
    FitResult,
    fit_levels,
    gradient_descent,
)
from hvd_adaptive.levels.histogram import LOG_BINS, LOG_EDGES, Histogram, tabulated
from hvd_adaptive.levels.magnitudes import (
    check_magnitudes,
    exponential_magnitudes,
    magnitude_count,
    signed_levels,
    uniform_magnitudes,
)
from hvd_adaptive.levels.mixture import Mixture
from hvd_adaptive.levels.multiplier import MultiplierFit, fit_multiplier
from hvd_adaptive.levels.objective import expected_variance, gradient, sample_variance
from hvd_adaptive.levels.probabilities import (
    entropy_bits,
    magnitude_probabilities,
    symbol_probabilities,
)
from hvd_adaptive.levels.tail import with_tail
from hvd_adaptive.levels.truncated_normal import Folded, TruncatedNormal

__all__ = [
    "LOG_BINS",
    "LOG_EDGES",
    "SOLVERS",
    "STARTS",
    "Descent",
    "Distribution",
    "FitError",
    "FitResult",
    "Folded",
    "Histogram",
    "Mixture",
    "MultiplierFit",
    "TruncatedNormal",
    "averaged_law",
    "best_level",
    "check_magnitudes",
    "coordinate_descent",
    "entropy_bits",
    "expected_variance",
    "exponential_magnitudes",
    "first_level",
    "fit_levels",
    "fit_multiplier",
    "gradient",
    "gradient_descent",
    "magnitude_count",
    "magnitude_probabilities",
    "sample_variance",
    "signed_levels",
    "symbol_probabilities",
    "tabulated",
    "uniform_magnitudes",
    "with_tail",
]
