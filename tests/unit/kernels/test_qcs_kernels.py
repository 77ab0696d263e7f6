"""QCS's kernels: against Algorithm 1 in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from kernel_cases import hadamard_matrix, ordinary, vector

from hvd_adaptive import QCS
from hvd_adaptive.kernels.reference import qcs as reference_qcs


def randomness(key: int, first: int, bucket: int, order: int, rows: int):
    """Signs and dithers of bucket ``bucket`` of a run, from the docstrings, in Python integers."""
    signs = oracle.uniform_integers(oracle.stream_key(key, 1, first, 0), bucket, order)
    dithers = oracle.uniform_integers(oracle.stream_key(key, 2, first, 0), bucket, rows)
    r = np.where(np.array(signs) >= 2**23, -1.0, 1.0)
    return r, (np.array(dithers) + 0.5) / 2**24 - 0.5


@pytest.mark.parametrize("q", (0.5, 1, 7))
@pytest.mark.parametrize(("k", "estimator"), ((64, "mmse"), (41, "unbiased"), (8, "mmse")))
def test_algorithm_one_in_float64(q, k, estimator):
    """Two whole buckets of 64 and a partial one of 20, which is filled up to 32."""
    scheme = QCS(bucket_size=64, measurements=k, quantizer_range=q, estimator=estimator)
    flat, key = vector(ordinary, 148, seed=k), 987654321987654321
    out, codec = torch.zeros(148), scheme.parts.default
    body = codec._body(flat, key)
    scales = body[:12].view(torch.float32)
    codec.add_bodies([body], [key], 1.0, out)
    partial = -(-k // 2)
    estimates = []
    for bucket, (first, inside, n, rows) in enumerate(
        [(0, 0, 64, k), (0, 1, 64, k), (2, 0, 32, partial)]
    ):
        g = np.zeros(n)
        own = flat[bucket * 64 : bucket * 64 + n].double().numpy()
        g[: own.size] = own
        r, u = randomness(key, first, inside, n, rows)
        h = hadamard_matrix(n)[:rows].astype(float)
        v = h @ (r * g) / np.sqrt(rows)
        scale = np.abs(v).max() / q
        np.testing.assert_allclose(scales[bucket], scale, rtol=1e-5)
        if q == 0.5:  # Eq. 5, mended
            quantized = np.where(v / scale + u > 0, 0.5, -0.5)
        else:
            quantized = np.rint(v / scale + u)
        assert np.abs(quantized).max() <= q
        gamma = n / rows - 1 + n / (4 * q * q) * np.log(rows) / (rows - 1)
        alpha = 1.0 if estimator == "unbiased" else 1 / (gamma + 1)
        estimate = alpha * r * (h.T @ (scale * (quantized - u))) / np.sqrt(rows)
        estimates.append(estimate[: own.size])
    np.testing.assert_allclose(out, np.concatenate(estimates), atol=2e-5)


def test_dither_is_symmetric_and_within_half():
    h = np.array([0, 1, 2**23 - 1, 2**23, 2**24 - 2, 2**24 - 1], np.float32)
    u = h * np.float32(2.0**-24) - np.float32(reference_qcs.DITHER_OFFSET)
    assert np.array_equal(u, ((h.astype(np.float64) + 0.5) / 2**24 - 0.5).astype(np.float32))
    assert np.array_equal(u, -u[::-1]) and np.abs(u).max() < 0.5
