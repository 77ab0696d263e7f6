"""Symbol probabilities by quadrature."""

import numpy as np
import pytest
from levels_oracles import BOTH, LAWS, integral
from scipy import integrate

from hvd_adaptive.levels import (
    TruncatedNormal,
    entropy_bits,
    magnitude_probabilities,
    signed_levels,
    symbol_probabilities,
)


@BOTH
@pytest.mark.parametrize("name", LAWS)
def test_probabilities_by_quadrature(name, symmetric):
    law = LAWS[name]
    levels = np.array([0.04 * symmetric, 0.11, 0.37, 1.0])
    table = signed_levels(levels, symmetric)

    def chance(r, bump):
        """That +-r, either sign alike, becomes the level where ``bump`` is 1."""
        return (np.interp(r, table, bump) + np.interp(-r, table, bump)) / 2

    expected = [
        integral(law, lambda r, bump=bump: chance(r, bump), *levels) for bump in np.eye(table.size)
    ]
    computed = symbol_probabilities(levels, law, symmetric)
    np.testing.assert_allclose(computed, expected, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(computed.sum(), 1.0, rtol=1e-12)
    np.testing.assert_array_equal(computed, computed[::-1])
    folded = magnitude_probabilities(levels, law, symmetric)
    np.testing.assert_allclose(folded.sum(), 1.0, rtol=1e-12)
    assert folded.shape == (4,)


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
