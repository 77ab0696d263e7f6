"""Levels that each bucket has of its own, and tables, against their definitions by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_adaptive import NUQSGD, ORQ, QSGD, BinGrad, LinearQuantile, TernGrad
from oracle import cases
from oracle.in_force import own_levels
from oracle.laws import buckets, clipped

SIZE = 100
vectors = st.builds(
    lambda law, count, seed: cases.vector(law, count, seed).astype(np.float32).astype(np.float64),
    st.sampled_from(cases.LAWS),
    st.integers(1, 400),
    st.integers(0, 2**31),
)
clips = st.sampled_from([None, None, 1.0, 2.5])


def levels_and_buckets(codec, v: np.ndarray):
    """Of each bucket, clipped if the codec clips."""
    places = buckets(v.size, codec.settings.bucket_size)
    cut = clipped(v, codec.settings.bucket_size, codec.settings.clip)
    return [
        (levels, np.sort(cut[own]))
        for own, levels in zip(places, own_levels(codec, v), strict=True)
    ]


def between(part: np.ndarray, a: float, b: float, c: float) -> float:
    """ORQ paper, Eq. 9: the variance of rounding what lies from a to c to a, b and c."""
    part = part[(part >= a) & (part <= c)]
    below = part <= b
    return float(((part - a) * (b - part))[below].sum() + ((part - b) * (c - part))[~below].sum())


def assert_best(part: np.ndarray, a: float, b: float, c: float) -> None:
    inside = part[(part >= a) & (part <= c)]
    if inside.size:
        least = min(between(part, a, x, c) for x in inside)
        size = 1e-5 * inside.size * (c - a) ** 2
        assert between(part, a, b, c) <= least * (1 + 1e-5) + size


@settings(max_examples=60)
@given(vectors, st.sampled_from([3, 5, 9]), clips)
def test_orq_halves_greedily(v, count, clip):
    """Algorithm 1: the ends are the bucket's own, each other level is the best between two."""
    codec = ORQ(keep_zeros=False, levels=count, bucket_size=SIZE, clip=clip)
    for levels, part in levels_and_buckets(codec, v):
        np.testing.assert_allclose(levels[[0, -1]], part[[0, -1]], rtol=1e-6)
        step = (count - 1) // 2
        while step:
            for k in range(step, count - 1, 2 * step):
                assert_best(part, levels[k - step], levels[k], levels[k + step])
            step //= 2


@settings(max_examples=40)
@given(vectors, st.sampled_from([3, 5, 9]))
def test_orq_coordinate_descent_satisfies_the_condition_everywhere(v, count):
    """Theorem 1: every inner level is the best between its neighbours."""
    codec = ORQ(keep_zeros=False, levels=count, solver="coordinate_descent", bucket_size=SIZE)
    for levels, part in levels_and_buckets(codec, v):
        for k in range(1, count - 1):
            assert_best(part, levels[k - 1], levels[k], levels[k + 1])


@settings(max_examples=40)
@given(vectors, st.sampled_from([2, 3, 9, 17]), clips)
def test_quantiles(v, count, clip):
    codec = LinearQuantile(keep_zeros=False, levels=count, bucket_size=SIZE, clip=clip)
    for levels, part in levels_and_buckets(codec, v):
        size = 1e-6 * np.abs(part).max()
        expected = np.quantile(part, np.linspace(0, 1, count))
        np.testing.assert_allclose(levels, expected, rtol=1e-6, atol=size)


@settings(max_examples=40)
@given(vectors, clips)
def test_bingrad_is_within_a_percent_of_the_best(v, clip):
    """Eq. 15: of all levels -b, b the least squared error, looked for on a fine grid."""
    for levels, part in levels_and_buckets(
        BinGrad(keep_zeros=False, bucket_size=SIZE, clip=clip), v
    ):
        size = np.abs(part)

        def error(b, size=size):
            beyond = size > b
            return ((size - b) ** 2)[beyond].sum() + (b * b - size**2)[~beyond].sum()

        least = min(error(b) for b in np.concatenate([size, np.linspace(0, size.max(), 501)]))
        assert -levels[0] == levels[1]
        assert error(levels[1]) <= 1.0101 * least + 1e-6 * (size**2).sum()


@pytest.mark.parametrize("bits", range(2, 9))
def test_fixed_tables(bits):
    """QSGD: k/s; ALQ's QSGDinf: 2**bits uniform levels; NUQSGD: powers of p; TernGrad: -1, 0, 1."""
    s = 2 ** (bits - 1) - 1
    np.testing.assert_allclose(QSGD(bits=bits).levels, np.arange(-s, s + 1) / s, atol=1e-15)
    np.testing.assert_allclose(QSGD(intervals=bits).levels[-2:], [1 - 1 / bits, 1])
    count = 2**bits
    uniform = (2 * np.arange(count) - count + 1) / (count - 1)
    np.testing.assert_allclose(QSGD(bits=bits, symmetric=True).levels, uniform, atol=1e-15)
    powers = 0.6 ** np.arange(s)[::-1]
    np.testing.assert_allclose(
        NUQSGD(bits=bits, multiplier=0.6).levels, [*-powers[::-1], 0.0, *powers], rtol=1e-12
    )
    nuqsgd = NUQSGD(bits=bits, multiplier=0.6, symmetric=True).levels[2 ** (bits - 1) :]
    np.testing.assert_allclose(nuqsgd, [0.6 * powers[0], *powers], rtol=1e-12)
    np.testing.assert_allclose(TernGrad().levels, [-1, 0, 1])
