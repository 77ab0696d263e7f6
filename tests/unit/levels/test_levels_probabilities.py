"""Symbol probabilities by quadrature and Monte Carlo; bounds by exact variances."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from levels_oracles import LAWS, random_magnitudes
from scipy import integrate, optimize, stats

from hvd_adaptive.levels import (
    Folded,
    Histogram,
    TruncatedNormal,
    code_length_bound,
    entropy_bits,
    magnitude_probabilities,
    nonzero_bound,
    sample_variance,
    signed_levels,
    symbol_probabilities,
    variance_bound,
)

BOTH = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-based"])


@BOTH
@pytest.mark.parametrize("name", LAWS)
def test_probabilities_by_quadrature(name, symmetric):
    law = LAWS[name]
    levels = np.array([0.04 * symmetric, 0.11, 0.37, 1.0])
    table = signed_levels(levels, symmetric)
    breaks = getattr(law, "edges", np.linspace(0, 1, 31))
    knots = np.unique(np.concatenate([[0.0, 1.0], breaks, levels]))
    expected = np.zeros(table.size)
    atoms = [(0.0, float(law.cdf(0.0))), (1.0, getattr(law, "one_mass", 0.0))]
    for j in range(table.size):
        bump = np.eye(table.size)[j]

        def chance(r, bump=bump):
            """That +-r, either sign alike, becomes level j."""
            return (np.interp(r, table, bump) + np.interp(-r, table, bump)) / 2

        expected[j] = sum(chance(r) * mass for r, mass in atoms)
        for low, high in pairwise(knots):
            expected[j] += integrate.quad(
                lambda r, f=chance: f(r) * float(law.pdf(r)), low, high, epsabs=1e-13
            )[0]
    computed = symbol_probabilities(levels, law, symmetric)
    np.testing.assert_allclose(computed, expected, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(computed.sum(), 1.0, rtol=1e-12)
    np.testing.assert_array_equal(computed, computed[::-1])
    folded = magnitude_probabilities(levels, law, symmetric)
    np.testing.assert_allclose(folded.sum(), 1.0, rtol=1e-12)
    assert folded.shape == (4,)


@BOTH
def test_probabilities_by_monte_carlo(symmetric):
    rng = np.random.default_rng(0)
    law = Folded(0.0, 0.3)
    theta = stats.truncnorm(-1 / 0.3, 1 / 0.3, 0.0, 0.3).rvs(400_000, random_state=rng)
    levels = np.array([0.1 * symmetric, 0.2, 0.5, 1.0])
    table = signed_levels(levels, symmetric)
    above = np.clip(np.searchsorted(table, theta), 1, table.size - 1)
    low, high = table[above - 1], table[above]
    codes = above - 1 + (rng.random(theta.size) < (theta - low) / (high - low))
    share = np.bincount(codes, minlength=table.size) / theta.size
    expected = symbol_probabilities(levels, law, symmetric)
    assert np.all(np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / theta.size))


def test_corollary_4_needs_its_missing_term():
    """Pr(l1) of a normal that is not even: the second term is
    ((mu + l1)(F(l1) - F(-l1)) - sigma^2 (p(l1) - p(-l1))) / (2 l1)."""
    mu, sigma, level = 0.1, 0.2, 0.3
    law = TruncatedNormal(mu, sigma)
    exact = integrate.quad(lambda t: (t + level) / (2 * level) * law.pdf(t), -level, level)[0]
    within = law.cdf(level) - law.cdf(-level)
    printed = (mu + level) * within / (2 * level)
    missing = -(sigma**2) * (law.pdf(level) - law.pdf(-level)) / (2 * level)
    np.testing.assert_allclose(printed + missing, exact, rtol=1e-8)
    assert abs(printed / exact - 1) > 0.01


def test_entropy():
    assert entropy_bits([0.5, 0.5]) == 1.0
    assert entropy_bits([1.0, 0.0]) == 0.0
    np.testing.assert_allclose(entropy_bits(np.full(8, 1 / 8)), 3.0)


def vectors(rng, dimension):
    """Hard cases for the bounds: constant, one-hot, sparse, heavy-tailed, on and between levels."""
    yield np.ones(dimension)
    yield np.eye(dimension)[0]
    yield rng.normal(size=dimension)
    yield rng.standard_cauchy(dimension)
    yield np.where(rng.random(dimension) < 0.1, rng.normal(size=dimension), 0) + 1e-9
    yield 2.0 ** -np.arange(dimension)
    yield 10.0 ** rng.uniform(-6, 0, dimension)


@BOTH
@given(
    seed=st.integers(0, 1000),
    dimension=st.sampled_from([1, 2, 17, 300]),
    count=st.integers(2, 6),
    order=st.sampled_from([1, 1.5, 2, 3, np.inf]),
)
def test_variance_bound_holds(symmetric, seed, dimension, count, order):
    rng = np.random.default_rng(seed)
    levels = random_magnitudes(rng, count, symmetric)
    bound = variance_bound(levels, dimension, order, symmetric)
    for v in vectors(rng, dimension):
        norm = np.linalg.norm(v, ord=order)
        r = np.minimum(np.abs(v) / norm, 1.0)
        variance = norm**2 * sample_variance(levels, r, symmetric)
        assert variance <= bound * (v @ v) * (1 + 1e-9) + 1e-300


@BOTH
def test_variance_bound_is_nearly_reached(symmetric):
    """A constant vector inside the first interval comes within a small factor."""
    levels = [0.2 * symmetric, 0.25, 0.5, 1.0]
    r = np.full(10_000, 0.01)
    variance = sample_variance(levels, r, symmetric)
    bound = variance_bound(levels, 10_000, 2, symmetric)
    assert bound / 1.3 < variance <= bound


@pytest.mark.parametrize("reach", [0.1, 1.0, 1.9, 2.0, 2.1, 5.0, 90.0])
def test_infimum_of_theorem_2(reach):
    """Against a bounded minimisation of the logarithm of K_p reach^(2-p)."""

    def log_term(p):
        return -np.log(2 - p) + (1 - p) * np.log((1 - p) / (2 - p)) + (2 - p) * np.log(reach)

    found = optimize.minimize_scalar(
        log_term, bounds=(1e-9, 1 - 1e-9), method="bounded", options={"xatol": 1e-10}
    )
    # levels [0, l1, 1] with l1 = 1/1000 and d chosen to give this reach; the other term is known.
    level, dimension = 1e-3, (reach * 1e3) ** 2
    between = (1 / level - 1) ** 2 * level / 4
    bound = variance_bound([0.0, level, 1.0], dimension, 2, False) - between
    np.testing.assert_allclose(bound, np.exp(found.fun), rtol=1e-6, atol=1e-9)


def test_bound_of_ternary_tables_has_no_ratio():
    assert variance_bound([0.0, 1.0], 100, 2, False) == 9.0
    assert variance_bound([1.0], 100, 2, True) == 100.0


@given(
    seed=st.integers(0, 1000),
    dimension=st.sampled_from([1, 20, 400]),
    order=st.sampled_from([1, 2, 4, np.inf]),
)
def test_nonzero_bound_holds(seed, dimension, order):
    rng = np.random.default_rng(seed)
    levels = random_magnitudes(rng, 4, False)
    bound = nonzero_bound(levels, dimension, order)
    assert bound <= dimension
    for v in vectors(rng, dimension):
        r = np.minimum(np.abs(v) / np.linalg.norm(v, ord=order), 1.0)
        assert np.minimum(r / levels[1], 1.0).sum() <= bound * (1 + 1e-9)


@BOTH
def test_code_length_bounds(symmetric):
    law = Histogram(np.linspace(0, 1, 101), np.linspace(1, 0, 101)[:-1] ** 9, zero_mass=0.5)
    levels = np.array([0.05 * symmetric, 0.1, 0.4, 1.0])
    loose = code_length_bound(levels, 1000, np.inf, symmetric)
    tight = code_length_bound(levels, 1000, np.inf, symmetric, law)
    probabilities = (symbol_probabilities if symmetric else magnitude_probabilities)(
        levels, law, symmetric
    )
    signs = 0 if symmetric else 1000
    np.testing.assert_allclose(tight, 32 + signs + 1000 * (entropy_bits(probabilities) + 1))
    np.testing.assert_allclose(loose, 32 + signs + 1000 * (np.log2(8 if symmetric else 4) + 1))
    assert tight < loose
    # What an ideal code of magnitudes and signs really takes for a vector of this law.
    signed = symbol_probabilities(levels, law, symmetric)
    assert 32 + 1000 * entropy_bits(signed) <= tight


def test_nonzero_bound_enters_theorem_3():
    levels = [0.0, 0.5, 1.0]
    expected = 16 + (4 + 2 * 10) + 100 * (np.log2(3) + 1)
    np.testing.assert_allclose(code_length_bound(levels, 100, 2, False, norm_bits=16), expected)


@pytest.mark.parametrize(
    ("dimension", "order", "keyword"),
    [(0, 2, "dimension"), (-1, 2, "dimension"), (4, 0.5, "norm_order"), (4, np.nan, "norm_order")],
)
def test_bad_bounds(dimension, order, keyword):
    for function in (variance_bound, code_length_bound):
        with pytest.raises(ValueError, match=keyword):
            function([0.5, 1.0], dimension, order, True)
    with pytest.raises(ValueError, match=keyword):
        nonzero_bound([0.0, 0.5, 1.0], dimension, order)
