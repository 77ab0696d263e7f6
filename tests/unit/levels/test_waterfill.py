"""Reverse water-filling: the least error by enumeration, rates, chances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_adaptive.levels.waterfill import allocate, sample

LOSSES = np.array([0.6, 0.15, 0.04, 0.01])


def error(energies, widths, chances):
    """Of unbiased estimates, bucket by bucket."""
    own = np.array([0.0, *LOSSES])[widths]
    return float(np.sum(((1 + own) / np.where(chances > 0, chances, 1) - 1) * energies))


@pytest.mark.parametrize("bits", (1.0, 1.5, 2.0, 3.0, 4.0))
@pytest.mark.parametrize("seed", range(6))
def test_no_whole_widths_are_better(seed, bits):
    """Of buckets that all have a bit or more, no widths of as many bits have less error."""
    energies = np.exp(np.random.default_rng(seed).uniform(0, 3, 5))
    widths, chances = allocate(energies, np.full(5, 64.0), LOSSES, bits)
    own = error(energies, widths, chances)
    spent = widths @ chances
    assert spent <= 5 * bits + 1e-9
    for other in itertools.product(range(1, 5), repeat=5):
        if sum(other) <= spent + 1e-9:
            assert own <= error(energies, np.array(other), np.ones(5)) * (1 + 1e-9)


def test_the_rate_is_met():
    draw = np.random.default_rng(0)
    energies, lengths = np.exp(draw.normal(0, 3, 1000)), np.full(1000, 4096)
    for bits in (0.25, 0.5, 1, 1.7, 2, 3, 3.9, 4):
        widths, chances = allocate(energies, lengths, LOSSES, bits)
        assert -1e-9 <= bits - (widths * chances).mean() <= 0.01
        assert (widths[chances < 1] <= 1).all() and (chances > 0).all()


def test_chances_are_the_best():
    """Lagrange: e (1 + d)/p² is the same for all buckets that are sampled."""
    energies = np.array([1.0, 4.0, 9.0, 400.0])
    widths, chances = allocate(energies, np.full(4, 64), LOSSES, 0.5)
    few = chances < 1
    assert few.sum() >= 3
    slopes = energies[few] / chances[few] ** 2
    np.testing.assert_allclose(slopes, slopes[0])
    assert (widths * chances).sum() == pytest.approx(2.0)


def test_equal_buckets_share_what_whole_bits_leave():
    widths, chances = allocate(np.ones(100), np.full(100, 64), LOSSES, 2.305)
    assert sorted(widths.tolist()) == [2] * 70 + [3] * 30 and (chances == 1).all()


def test_zeros_and_shorter_buckets():
    widths, chances = allocate(np.array([0.0, 1.0, 0.0]), np.array([64, 64, 7]), LOSSES, 1.0)
    assert widths.tolist() == [0, 2, 0] and chances.tolist() == [0, 1, 0]
    assert not allocate(np.zeros(3), np.ones(3), LOSSES, 2.0)[0].any()
    assert allocate(np.zeros(0), np.zeros(0), LOSSES, 2.0)[0].size == 0


def test_sampling_follows_the_chances():
    """Over a grid of the uniform number, each bucket is sent as often as its chance says."""
    chances = np.array([0.1, 0.7, 0.05, 0.4, 0.33, 0.9])
    sent = np.array([sample(chances, (k + 0.5) / 10000) for k in range(10000)])
    np.testing.assert_allclose(sent.mean(axis=0), chances, atol=2e-4)
    assert set(sent.sum(axis=1)) <= {2, 3}
