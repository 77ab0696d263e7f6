"""Wrong arguments are refused by name, by every function of the package's theory."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_adaptive import theory
from hvd_adaptive.levels import Histogram

UNIFORM = Histogram([0.0, 1.0], [1.0])
TABLE = [0.0, 0.5, 1.0]
GIVEN = {"iterations": 10, "second_moment": 1.0}
MOMENTUM = {"momentum": 0.5, "initial_gap": 1.0, "gradient_bound": 1.0}
# function: what it is given beside the first ones; then wrong values by keyword.
KEYWORDS = {
    "nonsmooth_convex": {"radius": 1.0},
    "smooth_convex": {"radius": 1.0, "smoothness": 1.0},
    "smooth_nonconvex": {"initial_gap": 1.0, "smoothness": 1.0},
    "momentum_convex": MOMENTUM | {"step_size": 0.1, "distance": 1.0},
    "momentum_nonconvex": MOMENTUM | {"smoothness": 1.0, "step_constant": 1.0},
    "compressed_descent": {"step_size": 0.1, "smoothness": 1.0, "initial_gap": 1.0, "gamma": 1.0},
    "feedback_descent": {"step_size": 0.1, "smoothness": 1.0, "initial_gap": 1.0, "residual": 1.0},
}
RUN = {"second_moment": -1, "epsilon": -0.1, "processors": 1.5, "bits": -1}
WRONG = {
    "nonsmooth_convex": RUN | {"second_moment": 0, "step_size": 0},
    "smooth_convex": RUN | {"variance": -2, "step_size": 1.0},
    "smooth_nonconvex": RUN | {"step_size": 2.0},
    "momentum_convex": RUN | {"momentum": 1.0, "lookahead": -1},
    "momentum_nonconvex": RUN | {"momentum": -0.1, "lookahead": -1},
    "compressed_descent": {"second_moment": np.inf, "estimator": "biased"},
    "feedback_descent": {"second_moment": 0},
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords(name):
    """Each number that must be given, and the optional ones."""
    given = GIVEN | KEYWORDS[name]
    assert getattr(theory, name)(**given) is not None
    for keyword, value in (dict.fromkeys(given, -1) | {"iterations": 0} | WRONG[name]).items():
        with pytest.raises(ValueError, match=f"^{keyword}={value!r}: must be"):
            getattr(theory, name)(**given | {keyword: value})


def test_target():
    arguments = {"smoothness": 1.0, "radius": 1.0, "second_moment": 1.0}
    with pytest.raises(ValueError, match="target=0: must be a finite number above 0"):
        theory.smooth_convex_to_reach(0, **arguments)


CALLS = [
    ("variance_bound", ([0, 1], 0), "dimension=0: must be a whole number >= 1"),
    ("variance_bound", ([0, 1], 2.5), "dimension=2.5"),
    ("variance_bound", ([0, 1], 4, np.nan), "norm_order=nan: must be a number >= 1"),
    ("variance_bound", ([0.5, 1], 4), "magnitudes: the first must be zero"),
    ("qsgd_variance_bound", (True, 4), "intervals=True"),
    ("nuqsgd_variance_bound", (0, 4), "internal_levels=0"),
    ("nuqsgd_variance_bound", (2, 4, 1.0), "multiplier=1.0: .* above 0 and below 1.0"),
    ("exponent_constant", (0,), "exponent=0"),
    ("small_coordinates", (-1,), "reach=-1"),
    ("exact_variance", ([0, 1], [1.0, np.nan]), "vector: must be finite"),
    ("exact_variance", ([0, 1], [1.0], 0), "norm_order=0"),
    ("code_length_bound", (TABLE, -1), "dimension=-1"),
    ("code_length_bound", (TABLE, 4, 0.5), "norm_order=0.5"),
    ("code_length_bound", (TABLE, 4, 2, False, None, -1), "norm_bits=-1"),
    ("nonzero_bound", (TABLE, 4, 0.5), "norm_order=0.5"),
    ("nonzero_bound", ([0.5, 1.0], 4), "magnitudes: the first must be zero"),
    ("qsgd_code_length", (0, 4), "intervals=0"),
    ("qsgd_dense_code_length", (0,), "dimension=0"),
    ("nuqsgd_code_length", (4, 1000), "dimension=1000: must be at least .* 2071"),
    ("sparse_code_length_bound", (TABLE, 0), "dimension=0"),
    ("sparse_code_length_bound", ([0.5, 1.0], 4), "magnitudes: the first must be zero"),
    ("sparse_code_length_bound", (TABLE, 4, -1), "norm_bits=-1"),
    ("elias_bits", ([1, 0],), "integers: must all be from 1"),
    ("elias_bits", (2**53 + 1,), "integers: must all be from 1"),
    ("elias_bits", ([1, 1.5],), "integers: must all be from 1 to .* and whole"),
    ("elias_bits", (np.nan,), "integers: must all be from 1"),
    ("convexity_margin", (0.5, 0.4, UNIFORM), "low, high: must satisfy"),
    ("convexity_margin", (0.5, 1.1, UNIFORM), "low, high: must satisfy"),
    ("convexity_margin", (np.nan, 0.5, UNIFORM), "low, high: must satisfy"),
    ("least_convex_pair", (UNIFORM, [0.5]), "points: must contain at least two"),
    ("variance_gap", (UNIFORM, 0), "dimension=0"),
    ("variance_gap", (UNIFORM, 5, 1.0), "level=1.0"),
    ("variance_gap_bound", (UNIFORM, 5, 0), "level=0"),
    ("objective_hessian", ([0.2, 1.0], UNIFORM), "magnitudes: the first must be zero"),
    ("qcs_variance_bound", (2.5, 1, 1), "order=2.5"),
    ("qcs_variance_bound", (64, 0, 1), "measurements=0: must be a whole number >= 1"),
    ("qcs_variance_bound", (16, 64, 1), "measurements=64: must be at most order=16"),
    ("qcs_variance_bound", (64, 16, 0), "quantizer_range=0: must be a finite number above 0"),
    ("residual_bound", (float("nan"), 0.5), "gamma=nan"),
    ("residual_bound", (1, 0), "weight=0"),
    ("residual_bound", (1, 0.5, "biased"), "estimator='biased'"),
    ("residual_bound", (1, 0.5, "mmse", 1), "correlated=1"),
    ("best_feedback", (1, "biased"), "estimator='biased'"),
    ("feedback_limit", (1, None), "estimator=None"),
    ("mmse_error", ("x",), "gamma='x'"),
    ("Segment", (1.5, 1.0, 1.0), "steps=1.5: must be a whole number >= 1"),
    ("Segment", (1, float("inf"), 1.0), "variance_bound=inf: must be a finite number >= 0"),
    ("Segment", (1, 1.0, -1.0), "code_length=-1.0"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), CALLS)
def test_calls(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(theory, name)(*arguments)
