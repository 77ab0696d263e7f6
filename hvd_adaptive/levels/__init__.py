"""Define level tables: laws of coordinates, the objective, and solvers.

The functions share these arguments:

    magnitudes     (K,), or (..., K) for several tables, as in ``check_magnitudes``
    distribution   law of the folded coordinates r = |v_i|/||v||
    symmetric      True for the levels +-l1, ..., +-1, False for 0, +-l1, ..., +-1
"""

from hvd_adaptive.levels.averaged import averaged_law as averaged_law
from hvd_adaptive.levels.distributions import LOG_BINS as LOG_BINS
from hvd_adaptive.levels.distributions import LOG_EDGES as LOG_EDGES
from hvd_adaptive.levels.distributions import Distribution as Distribution
from hvd_adaptive.levels.distributions import Histogram as Histogram
from hvd_adaptive.levels.fit import SOLVERS as SOLVERS
from hvd_adaptive.levels.fit import STARTS as STARTS
from hvd_adaptive.levels.fit import coordinate_descent as coordinate_descent
from hvd_adaptive.levels.fit import fit_levels as fit_levels
from hvd_adaptive.levels.fit import fit_multiplier as fit_multiplier
from hvd_adaptive.levels.fit import gradient_descent as gradient_descent
from hvd_adaptive.levels.magnitudes import check_magnitudes as check_magnitudes
from hvd_adaptive.levels.magnitudes import exponential_magnitudes as exponential_magnitudes
from hvd_adaptive.levels.magnitudes import signed_levels as signed_levels
from hvd_adaptive.levels.magnitudes import uniform_magnitudes as uniform_magnitudes
from hvd_adaptive.levels.objective import entropy_bits as entropy_bits
from hvd_adaptive.levels.objective import expected_variance as expected_variance
from hvd_adaptive.levels.objective import gradient as gradient
from hvd_adaptive.levels.objective import magnitude_probabilities as magnitude_probabilities
from hvd_adaptive.levels.objective import sample_variance as sample_variance
from hvd_adaptive.levels.objective import symbol_probabilities as symbol_probabilities
from hvd_adaptive.levels.tail import with_tail as with_tail
from hvd_adaptive.levels.truncated_normal import Mixture as Mixture
from hvd_adaptive.levels.truncated_normal import TruncatedNormal as TruncatedNormal
