"""Bucket norms of both kernels against float64, their exact rules at the edges, and histograms
against the documented edges of bins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_adaptive.kernels.numba import tables as cpu
from hvd_adaptive.kernels.reference import tables as reference
from hvd_adaptive.levels import LOG_EDGES

both = pytest.mark.parametrize("kernels", (cpu, reference), ids=("cpu", "reference"))


def norms(kernels, values, bucket: int, norm: str) -> np.ndarray:
    return kernels.bucket_norms(torch.tensor(values, dtype=torch.float32), bucket, norm).numpy()


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=80),
    st.sampled_from(("l2", "linf")),
)
def test_norms_of_anything_against_float64(values, norm):
    x = np.array(values, np.float32).astype(np.float64)
    want = np.abs(x).max() if norm == "linf" else np.sqrt(np.sum((x / 2**60) ** 2)) * 2**60
    for kernels in (cpu, reference):
        got = float(norms(kernels, values, len(values), norm)[0])
        if want < 2.0**-126 * (1 - 1e-5):
            assert got == 0
        elif want > float(np.finfo(np.float32).max) * (1 + 1e-5):
            assert np.isnan(got)
        elif 2.0**-126 * (1 + 1e-5) < want < float(np.finfo(np.float32).max) * (1 - 1e-5):
            assert got == pytest.approx(want, rel=1e-5)


@both
@pytest.mark.parametrize("norm", ("l2", "linf"))
def test_exact_rules(kernels, norm):
    least = 2.0**-126
    cases = [
        ([0.0, -0.0, 0.0], 0.0),
        ([least, 0.0], least),
        ([np.nextafter(np.float32(least), np.float32(0))], 0.0),
        ([1e-45], 0.0),
        ([-3.0], 3.0),
        ([np.nan, 1.0], np.nan),
        ([np.inf, 1.0], np.nan),
        ([-np.inf, np.inf], np.nan),
        ([np.inf, np.nan], np.nan),
        ([3.4028234663852886e38], 3.4028234663852886e38),
    ]
    for values, want in cases:
        got = norms(kernels, values, len(values), norm)[0]
        assert np.array_equal(got, np.float32(want), equal_nan=True), (values, got)
        assert not np.signbit(got) or np.isnan(got)


def counts(r: np.ndarray) -> np.ndarray:
    """Independent counts of float32 values in [0, ...): of each bin, of zeros and of ones."""
    r = np.asarray(r, np.float32).astype(np.float64)
    inner = LOG_EDGES.copy()
    inner[0] = 5e-324
    binned, _ = np.histogram(r[(r > 0) & (r < 1)], inner)
    return np.concatenate([binned, [np.sum(r == 0)], [np.sum(r >= 1)]])


@both
def test_every_edge_and_its_float32_neighbours(kernels):
    edges = LOG_EDGES.astype(np.float32)
    assert np.array_equal(edges.astype(np.float64), LOG_EDGES), "edges are exact in float32"
    for values in (edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(2))):
        for k in range(64):  # apart, so that neighbours' errors do not even out
            own = values[k::64]
            assert np.array_equal(kernels.histogram(torch.tensor(own), 1.0), counts(own))


@both
@pytest.mark.parametrize("scale", (1.0, 2.0**-100, 2.0**60, 2.0**-126))
def test_random_values_under_exact_scales(kernels, scale):
    generator = np.random.default_rng(5)
    r = (2.0 ** generator.uniform(-40, 0.1, 5000)).astype(np.float32)
    r[:100], r[100:200], r[200] = 0, 1, np.float32(1e-44)
    v = r * generator.choice([-1, 1], r.size).astype(np.float32) * np.float32(scale)
    exact = np.abs(v) / np.float32(scale) == r  # not those that the product made denormal
    got = kernels.histogram(torch.from_numpy(v[exact]), scale)
    assert np.array_equal(got, counts(r[exact]))
    assert got.sum() == exact.sum() and got.dtype == torch.int64 and got.shape == (1666,)


def test_kernels_agree_under_any_scale():
    generator = np.random.default_rng(6)
    flat = torch.from_numpy(np.exp(5 * generator.standard_normal(4000)).astype(np.float32))
    for scale in (1e-30, 0.3, 7.0, 123.456, 1e38):
        assert np.array_equal(cpu.histogram(flat, scale), reference.histogram(flat, scale))


@both
def test_nothing_negative_zero_and_nan(kernels):
    assert kernels.histogram(torch.empty(0), 1.0).sum() == 0
    values = np.array([0.5, np.nan, -0.25, np.inf, 0.0, -0.0, -np.nan], np.float32)
    got = kernels.histogram(torch.from_numpy(values), 1.0)
    assert np.array_equal(got, counts(np.abs(values[~np.isnan(values)])))
