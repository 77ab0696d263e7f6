"""Histograms against quadrature, samples, and their own definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from levels_oracles import LAWS, integral

from hvd_adaptive.levels import LOG_BINS, LOG_EDGES, Distribution, Histogram

X = np.array([0.0, 1e-9, 0.03, 0.1, 0.3, 0.31, 0.5, 0.77, 0.999, 1.0])


def test_log_edges_are_the_top_bits_of_a_float32():
    assert LOG_EDGES.shape == (LOG_BINS + 1,) and LOG_EDGES[0] == 0 and LOG_EDGES[-1] == 1
    rng = np.random.default_rng(0)
    r = np.exp2(rng.uniform(-40, 0, 10_000)).astype(np.float32)
    bits = r.view(np.uint32).astype(int)
    # Exponent and 3 bits of mantissa from 2^-28 on, exponent and 7 bits from 2^-12 on.
    coarse = np.maximum((bits >> 20) - ((127 - 28) << 3), 0)
    index = np.where(r < 2.0**-12, coarse, (bits >> 16) - ((127 - 12) << 7) + 128)
    np.testing.assert_array_equal(index, np.searchsorted(LOG_EDGES, r, side="right") - 1)


@pytest.mark.parametrize("name", LAWS)
def test_moments_integrate_the_density(name):
    law = LAWS[name]
    for x in X:
        for power, value in enumerate(law.moments(x)):
            expected = integral(law, lambda r, k=power, x=x: r**k * (r <= x), x)
            np.testing.assert_allclose(value, expected, rtol=1e-8, atol=1e-300)
    grid = X.reshape(2, 5)
    for values in (*law.moments(grid), law.pdf(grid)):
        assert values.shape == (2, 5)
    np.testing.assert_array_equal(law.cdf(grid), law.moments(grid)[0])


@pytest.mark.parametrize("name", LAWS)
def test_ppf_is_the_least_point(name):
    law = LAWS[name]
    y = np.concatenate([np.linspace(0.0, 1.0, 41), [1e-12, 1 - 1e-9]])
    x = law.ppf(y)
    assert np.all((x >= 0) & (x <= 1)) and law.ppf(y[:40].reshape(2, 20)).shape == (2, 20)
    assert np.all(law.cdf(x) >= y - 1e-12)
    inside = x > 1e-6
    assert np.all(law.cdf(x[inside] * (1 - 1e-9)) <= y[inside] + 1e-12)
    np.testing.assert_array_equal(x[y <= law.cdf(0.0)], 0.0)


def test_from_samples_counts_every_sample():
    r = np.array([0.0, 0.0, 1e-12, 0.25, 0.2505, 0.99999, 1.0, 1.0 + 1e-9])
    law = Histogram.from_samples(r, weights=np.arange(1.0, 9.0))
    assert law.zero_mass == 3 / 36 and law.one_mass == 15 / 36
    np.testing.assert_allclose(law.masses.sum(), 18 / 36)
    assert law.masses[0] == 3 / 36
    assert law.masses[np.searchsorted(LOG_EDGES, 0.25)] == 9 / 36


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_samples_and_histogram_have_the_same_mass_up_to_each_edge(samples):
    law = Histogram.from_samples(samples)
    edges = LOG_EDGES[[0, 1, 100, 300, 480, 500, 511]]
    # An edge belongs to the bin above it.
    expected = [np.mean((np.array(samples) < e) | (np.array(samples) == 0)) for e in edges]
    np.testing.assert_allclose(law.cdf(edges), expected, atol=1e-12)


def test_wrong_input():
    for masses, zero_mass in ((np.nan, 0), (-1.0, 2), (0.0, 0), (np.inf, 0), (1.0, -0.5)):
        with pytest.raises(ValueError, match=r"edges|masses"):
            Histogram([0, 1], [masses], zero_mass)
    for edges, count in (([0, 0.5, 0.5, 1], 3), ([0, 2], 1), ([-1, 1], 1), ([0, 1], 2)):
        with pytest.raises(ValueError, match=r"edges|masses"):
            Histogram(edges, [1.0] * count)
    for r in (-0.1, 1.1, np.nan, np.inf):
        with pytest.raises(ValueError, match="r:"):
            Histogram.from_samples([r])
    with pytest.raises(ValueError, match="masses"):
        Histogram.from_counts(np.ones(511))


def test_from_counts():
    counts = np.random.default_rng(2).integers(1, 9, LOG_BINS + 2)
    law = Histogram.from_counts(counts)
    assert law.zero_mass == counts[-2] / counts.sum() and law.one_mass == counts[-1] / counts.sum()
    np.testing.assert_allclose(law.masses, counts[:-2] / counts.sum())


def test_tabulated_finds_the_atoms():
    law, plain = LAWS["atoms"], Distribution()
    plain.cdf = law.cdf
    table = plain.tabulate()
    np.testing.assert_allclose([table.zero_mass, table.one_mass], [law.zero_mass, law.one_mass])
    np.testing.assert_allclose(table.cdf(LOG_EDGES), law.cdf(LOG_EDGES), atol=1e-12)
    assert law.tabulate() is law
