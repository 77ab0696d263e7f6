"""The law that a sampled histogram is taken for: its tail, its prior, what stays as it was."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_adaptive.levels import LOG_BINS, LOG_EDGES, Histogram, with_tail
from hvd_adaptive.levels.tail import PRIOR, TAIL


def counted(r: np.ndarray, weights: np.ndarray | float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Sums of weights and of their squares by bin, then of zeros and of ones."""
    weights = np.broadcast_to(weights, r.shape)
    bins = np.searchsorted(LOG_EDGES, r, side="right") - 1
    bins = np.where(r == 0, LOG_BINS, np.where(r >= 1, LOG_BINS + 1, bins))
    size = LOG_BINS + 2
    return np.bincount(bins, weights, size), np.bincount(bins, weights**2, size)


def pareto(rng: np.random.Generator, exponent: float, least: float, n: int) -> np.ndarray:
    """Samples of a Pareto law on [least, 1]."""
    at_one = least**exponent
    return least * (1 - rng.random(n) * (1 - at_one)) ** (-1 / exponent)


@pytest.mark.parametrize("exponent", [0.5, 2.0, 8.0])
def test_a_pareto_law_keeps_its_tail(exponent):
    """P(r > x) beyond the largest of all samples, where the histogram has nothing: within 5 sigma
    of the exponent, whose standard error is exponent / sqrt(TAIL), of the truth. No prior."""
    rng, least, n = np.random.default_rng(1), 2.0**-10, 20_000
    r = np.sort(pareto(rng, exponent, least, n))
    law = with_tail(*counted(r), buckets=1e12)
    start = r[-TAIL]
    x = np.sqrt(r[-1]) if exponent > 1 else (1 + start) / 2
    at_one = (1 / start) ** -exponent
    truth = TAIL / n * ((x / start) ** -exponent - at_one) / (1 - at_one)
    slope = np.log(x / start) * exponent * 5 / np.sqrt(TAIL)
    found = 1 - law.cdf(x)
    assert truth * np.exp(-slope) / 1.1 <= found <= truth * np.exp(slope) * 1.1
    assert Histogram.from_counts(counted(r)[0]).cdf(r[-1] * 1.01) > 1 - 1e-12


def test_masses_below_the_tail_and_atoms_stay():
    rng = np.random.default_rng(2)
    r = np.concatenate([np.abs(rng.standard_normal(5000)) / 40, np.zeros(300), np.ones(20)])
    counts, squares = counted(r)
    law = with_tail(counts, squares, buckets=1e12)
    raw = Histogram.from_counts(counts)
    below = LOG_EDGES[1:] < np.sort(r)[-TAIL - 25]
    np.testing.assert_allclose(law.masses[below], raw.masses[below], rtol=1e-6)
    assert law.zero_mass == pytest.approx(raw.zero_mass, rel=1e-6)
    assert law.one_mass == pytest.approx(raw.one_mass, rel=1e-6)
    changed = np.abs(law.masses - raw.masses).sum()
    assert 0 < changed <= 2 * TAIL / r.size * (1 + 1e-6)


def test_weighted_coordinates_are_counted_by_kish():
    """Where one coordinate in four weighs 1,000 times as much, TAIL of those count, not TAIL of
    all."""
    rng = np.random.default_rng(3)
    r = np.sort(pareto(rng, 1.5, 2.0**-8, 4000))
    weights = np.where(np.arange(r.size) % 4 == 0, 1000.0, 1.0)
    counts, squares = counted(r, weights)
    law = with_tail(counts, squares, buckets=1e12)
    raw = Histogram.from_counts(counts)
    first = np.flatnonzero(np.abs(law.masses / law.masses.sum() - raw.masses) > 1e-9)[0]
    above = weights[r >= LOG_EDGES[first + 1]]
    assert above.sum() ** 2 / (above**2).sum() == pytest.approx(TAIL, abs=2)


@pytest.mark.parametrize("buckets", [2.0, 20.0, 500.0])
def test_the_prior_brings_its_share_of_the_squares(buckets):
    """PRIOR / (buckets + 1) of the sum of r^2, evenly over the octaves above the tail's start."""
    rng = np.random.default_rng(4)
    counts, squares = counted(np.abs(rng.standard_normal(20_000)) / 100)
    with_prior, without = with_tail(counts, squares, buckets), with_tail(counts, squares, 1e15)
    scale = without.masses[200:900].sum() / with_prior.masses[200:900].sum()
    added = scale * np.diff(with_prior.moments(np.array([0.125, 0.25, 0.5, 1.0]))[2])
    added -= np.diff(without.moments(np.array([0.125, 0.25, 0.5, 1.0]))[2])
    assert added == pytest.approx(added.mean(), rel=1e-2)
    share = scale * with_prior.moments(1.0)[2] / without.moments(1.0)[2] - 1
    assert share == pytest.approx(PRIOR / (buckets + 1), rel=1e-3)


def test_laws_that_are_known_are_what_samples_tend_to():
    """The largest change of F falls as 1/n."""
    changes = []
    for n in (1_000, 100_000):
        r = pareto(np.random.default_rng(5), 3.0, 0.01, n)
        law, (counts, _) = with_tail(*counted(r), buckets=n / 50), counted(r)
        raw = Histogram.from_counts(counts)
        changes.append(np.max(np.abs(law.cdf(LOG_EDGES) - raw.cdf(LOG_EDGES))))
    assert changes[1] < changes[0] / 30


@pytest.mark.parametrize("count", [1, 30, 1e20])
@pytest.mark.parametrize("place", [0, 127, 128, LOG_BINS - 1])
def test_coordinates_that_are_all_equal_stay_where_they_are(place, count):
    counts = np.zeros(LOG_BINS + 2)
    counts[place] = count
    law = with_tail(counts, counts, buckets=20.0)
    assert np.isfinite(law.masses).all()
    assert 1 - law.cdf(1.5 * LOG_EDGES[place + 1]) <= 0.005


@pytest.mark.parametrize("wrong", ["counts", "squares"])
def test_negative_sums_are_refused(wrong):
    sums = {"counts": np.ones(LOG_BINS + 2), "squares": np.ones(LOG_BINS + 2)}
    sums[wrong][7] = -2.5
    with pytest.raises(ValueError, match=f"^{wrong}: must not be negative, not -2.5"):
        with_tail(**sums, buckets=5.0)


@pytest.mark.parametrize("place", [-1, -2])
def test_zeros_and_ones_alone_have_no_tail(place):
    counts = np.zeros(LOG_BINS + 2)
    counts[place] = 5.0
    assert with_tail(counts, counts, buckets=5.0).masses.sum() == 0
