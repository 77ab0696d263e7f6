"""Fitted tables: near the empirical optimum, valid for every law."""

import numpy as np
import pytest
from levels_oracles import BOTH, LAWS, make_buckets
from optimal_levels import optimal_levels

from hvd_adaptive.levels import (
    LOG_BINS,
    SOLVERS,
    STARTS,
    Histogram,
    Mixture,
    check_magnitudes,
    expected_variance,
    fit_levels,
    gradient_descent,
    sample_variance,
)
from hvd_adaptive.levels.optimal import grid_optimum

pytestmark = pytest.mark.many
ORDER = pytest.mark.parametrize("order", [2, np.inf], ids=["l2", "linf"])

# Buckets of each shape, and the most bits at which they have enough samples in each interval. With
# fewer, the optimum on the samples puts levels on single ones, which no histogram knows and which
# the next gradient does not repeat (test_fresh_data.py).
BUCKETS = {
    "normal": (20, 8),
    "mixture": (20, 8),
    "laplace": (20, 8),
    "student": (60, 7),
    "sparse": (60, 6),
}


@BOTH
@ORDER
@pytest.mark.parametrize("shape", BUCKETS)
def test_measured_variance_is_within_5_percent_of_the_optimum(shape, order, symmetric):
    count, most_bits = BUCKETS[shape]
    r, w = make_buckets(shape, order, count)
    law = Histogram.from_samples(r, w)
    for bits in (2, 3, most_bits):
        fitted = fit_levels(law, bits, symmetric)
        best = optimal_levels(r, 2 ** (bits - 1), symmetric, w, grid=2048)
        found, least = (sample_variance(m, r, symmetric, w) for m in (fitted.magnitudes, best))
        assert found <= 1.05 * least, bits


@BOTH
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bits", [3, 6])
def test_model_optimum(bits, solver, symmetric):
    """Within 1% of a much finer programme on the distribution itself, whatever its shape."""
    laws = [
        Histogram.from_samples(*make_buckets("sparse", 2, 20)),
        Histogram.from_samples(*make_buckets("student", 2, 20)),
        Mixture([0.0, 1e-3, 0.0], [1e-3, 0.01, 0.1], [1.0, 2.0, 3.0]),
    ]
    for law in laws:
        fitted = fit_levels(law, bits, symmetric, solver)
        best = grid_optimum(law, 2 ** (bits - 1), symmetric, 2000)
        table = law.tabulate()
        assert fitted.objective <= 1.01 * expected_variance(best, table, symmetric)
        own = expected_variance(fitted.magnitudes, table, symmetric)
        assert fitted.objective == pytest.approx(own, rel=1e-12)


@BOTH
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bits", [2, 3, 7])
@pytest.mark.parametrize(
    "law",
    [
        Histogram([0.0, 1.0], [0.0], one_mass=1.0),
        Histogram([0.0, 1.0], [0.0], zero_mass=0.5, one_mass=0.5),
        Histogram([0.0, 1.0], [1.0]),
        Histogram([0.3, 0.3 + 1e-15], [1.0], zero_mass=1e12),
        Histogram([1.0 - 1e-16, 1.0], [1.0]),
        Histogram([0.0, 1e-300], [1.0]),
        Histogram.from_counts(np.eye(LOG_BINS + 2)[0]),
        Histogram.from_counts(np.eye(LOG_BINS + 2)[LOG_BINS - 1]),
        Mixture([0.0], [0.0], [1.0]),
        Mixture([0.011], [0.0], [1.0]),
        Mixture([1.0], [0.0], [1.0]),
        Mixture([3.0], [1e-12], [1.0]),
        Mixture([0.0], [1e12], [1.0]),
        Mixture([0.2, -0.7], [0.0, 1e-9], [1.0, 1e-30]),
    ],
    ids=range(14),
)
def test_degenerate_laws_give_valid_tables(law, bits, solver, symmetric):
    fitted = fit_levels(law, bits, symmetric, solver)
    assert fitted.magnitudes.shape == (2 ** (bits - 1),)
    check_magnitudes(fitted.magnitudes, symmetric)
    check_magnitudes(fitted.magnitudes.astype(np.float32), symmetric)
    assert np.isfinite(fitted.objective) and fitted.objective >= 0


@pytest.mark.parametrize("symmetric", [True, False])
def test_all_zero_is_an_error(symmetric):
    with pytest.raises(ValueError, match="zero"):
        fit_levels(Histogram([0.0, 1.0], [0.0], zero_mass=1.0), 3, symmetric)


@BOTH
@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("count", [2, 4, 32])
def test_starts_are_valid(name, count, symmetric):
    for law in (*LAWS.values(), Histogram([0.0, 1.0], [0.0], 0.5, 0.5)):
        levels = STARTS[name](law, count, symmetric)
        assert levels.shape == (count,)
        check_magnitudes(np.asarray(levels).astype(np.float32), symmetric)


def test_starts_are_what_they_say():
    law = Histogram(np.linspace(0, 1, 1001), np.linspace(1, 0.001, 1000))
    np.testing.assert_allclose(STARTS["uniform"](law, 4, True), np.array([1, 3, 5, 7]) / 7)
    np.testing.assert_allclose(STARTS["uniform"](law, 3, False), [0, 0.5, 1])
    np.testing.assert_allclose(STARTS["exponential"](law, 4, True), [0.125, 0.25, 0.5, 1])
    np.testing.assert_allclose(STARTS["exponential"](law, 4, False), [0, 0.25, 0.5, 1])
    quantiles = STARTS["quantile"](law, 5, False)
    np.testing.assert_allclose(law.cdf(quantiles), [0, 0.25, 0.5, 0.75, 1])
    # The density falls linearly to zero: the integral of its cube root up to x is 1-(1-x)^(4/3).
    levels = STARTS["cube_root"](law, 5, False)
    np.testing.assert_allclose(1 - (1 - levels) ** (4 / 3), np.arange(5) / 4, atol=2e-3)


def test_extra_starts_are_used():
    law = Histogram.from_samples(make_buckets("student", 2, 3)[0])
    best = gradient_descent(fit_levels(law, 4, True).magnitudes, law, True, tolerance=0).magnitudes
    with_extra = fit_levels(law, 4, True, extra_starts=[best])
    before = expected_variance(best, law, True)
    assert with_extra.objective <= before * (1 + 1e-9)
    with pytest.raises(ValueError, match="magnitudes"):
        fit_levels(law, 3, True, extra_starts=[[0.5, 0.4, 0.6, 1.0]])
