"""The private random numbers: the documented integers, uniform, independent between streams.

Every statistical test is deterministic (fixed keys). Its threshold is stated as a significance
level: with a sound generator, new keys would fail any of them with a chance below 1e-3 in all.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import stats

from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.reference import tables as reference

N = 1 << 18
CPU = torch.device("cpu")
BASE = (7, 1, 100, 3)
# Streams that differ in one of seed, rank, step, group, by little and by much; some whose numbers
# are swapped, or have the same sum; of small numbers.
STREAMS = [BASE, (8, 1, 100, 3), (7, 2, 100, 3), (7, 1, 101, 3), (7, 1, 100, 4)]
STREAMS += [(7 + 2**32, 1, 100, 3), (7, 1, 100, 3 + 2**63), (1, 7, 100, 3), (7, 1, 3, 100)]
STREAMS += [(6, 2, 100, 3), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)]
STREAMS += [(2**64 - 1, 0, 0, 0)]


def uniform(key: int, n: int = N, bucket: int | None = None) -> np.ndarray:
    u = reference.uniforms(n, bucket or n, key, CPU).numpy().astype(np.float64)
    return (u + 0.5) / 2**24


def standard(u: np.ndarray) -> np.ndarray:
    return (u - 0.5) * np.sqrt(12)


@pytest.fixture(scope="module")
def streams() -> list[np.ndarray]:
    return [uniform(random.stream_key(*numbers)) for numbers in STREAMS]


numbers = st.integers(0, 2**64 - 1)


@given(numbers, numbers, numbers, numbers, st.integers(0, 2**40))
def test_keys_are_the_documented_integers(seed, rank, step, group, bucket):
    stream = random.stream_key(seed, rank, step, group)
    assert stream == oracle.stream_key(seed, rank, step, group)
    key = oracle.mix64((stream + (bucket + 1) * oracle.GOLDEN) % 2**64)
    assert random.bucket_key(stream, bucket) == (key % 2**32, key // 2**32)


@hypothesis_settings(max_examples=30)
@given(numbers, st.integers(1, 300), st.integers(1, 700))
def test_coordinates_get_the_documented_integers(key, bucket, n):
    want = [
        u
        for b in range(-(-n // bucket))
        for u in oracle.uniform_integers(key, b, min(bucket, n - b * bucket))
    ]
    assert reference.uniforms(n, bucket, key, CPU).tolist() == want


def test_uniform_by_chi_square(streams):
    """4,096 cells (top 12 bits) and 4,096 cells of the low 12 bits, 16 streams: p > 1e-7 each."""
    for u in streams:
        k = (u * 2**24).astype(np.int64)
        for cells in (k >> 12, k & 4095):
            statistic = stats.chisquare(np.bincount(cells, minlength=4096))
            assert 1e-7 < statistic.pvalue < 1 - 1e-7


def test_uniform_over_buckets_at_a_fixed_coordinate():
    """One coordinate a bucket: consecutive keys must do as well as consecutive counters."""
    n = 1 << 16
    for bucket, key in ((1, 5), (3, 6)):
        u = uniform(random.stream_key(key), n * bucket, bucket)[::bucket]
        assert 1e-7 < stats.chisquare(np.histogram(u, 256, (0, 1))[0]).pvalue < 1 - 1e-7
        z = standard(u)
        lagged = [np.mean(z[:-lag] * z[lag:]) * np.sqrt(n - lag) for lag in range(1, 65)]
        assert np.max(np.abs(lagged)) < 5.2  # p = 2e-7 each


def test_pairs_fill_the_square(streams):
    """16 x 16 cells of (u_j, u_{j+lag}), and of the same coordinate in two streams: p > 1e-7."""
    cells = [(u * 16).astype(np.int64) for u in streams]
    pairs = [(c[:-lag], c[lag:]) for c in cells[:4] for lag in (1, 2, 3, 16, 32, 128, 512)]
    pairs += [(a, b) for a, b in itertools.combinations(cells[:8], 2)]
    for a, b in pairs:
        counts = np.bincount(16 * a + b, minlength=256)
        assert 1e-7 < stats.chisquare(counts).pvalue < 1 - 1e-7


def test_streams_are_uncorrelated_at_every_shift(streams):
    """Of all 136 pairs, a stream with itself, too: cyclic cross-correlations at 262,144 shifts. One
    beyond 7.9 has p = 136 * 262,144 * 3e-15; together they look normal."""
    spectra = [np.fft.rfft(standard(u)) for u in streams]
    for i, j in itertools.combinations_with_replacement(range(len(spectra)), 2):
        shifts = np.fft.irfft(spectra[i] * np.conj(spectra[j])) / np.sqrt(N)
        own = shifts[1 : N // 2] if i == j else shifts
        assert np.abs(own).max() < 7.9, (i, j)
        assert i or stats.kstest(own, "norm").pvalue > 1e-7, j


def test_triples_fill_the_cube(streams):
    """32 x 32 x 32 cells of three numbers of one stream, 8 expected in each: p > 1e-7."""
    for u in streams[:4]:
        c = (u * 32).astype(np.int64)
        for near, far in ((1, 2), (1, 16), (16, 32), (128, 256)):
            cells = 1024 * c[:-far] + 32 * c[near : near - far] + c[far:]
            assert 1e-7 < stats.chisquare(np.bincount(cells, minlength=32**3)).pvalue < 1 - 1e-7


def test_neighbouring_buckets_are_uncorrelated():
    """8,192 coordinates of 64 buckets, all pairs, lag 0: beyond 5.6 with p = 2e-8 each."""
    z = standard(uniform(random.stream_key(*BASE), 64 * 8192, 8192)).reshape(64, 8192)
    correlation = z @ z.T / np.sqrt(8192)
    off = correlation[np.triu_indices(64, 1)]
    assert np.abs(off).max() < 5.6
    assert stats.kstest(off, "norm").pvalue > 1e-6


def test_no_two_streams_share_a_key():
    """Small seeds, ranks, steps, groups: 100,000 streams, and the buckets of some of them."""
    keys = {
        random.stream_key(*n)
        for n in itertools.product(range(5), range(20), range(50), (*range(18), 2**63, 2**63 + 1))
    }
    assert len(keys) == 5 * 20 * 50 * 20
    buckets = [random.bucket_key(random.stream_key(0, r), b) for r in range(8) for b in range(5000)]
    assert len(set(buckets)) == 40_000
