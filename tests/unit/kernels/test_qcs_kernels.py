"""QCS's kernels: Numba against the reference bit for bit, both against Algorithm 1 in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from kernel_cases import KINDS, assert_agree, heavy, ordinary, same_bits, vector
from test_hadamard import sylvester

from hvd_adaptive import QCS
from hvd_adaptive.kernels.numba import qcs as cpu_qcs
from hvd_adaptive.kernels.reference import qcs as reference_qcs


def encoded(module, flat: torch.Tensor, scheme: QCS, key: int):
    codec = scheme.parts.default
    runs = codec._runs(flat.numel())
    buckets = sum(run.buckets for run in runs)
    scales = torch.full((buckets,), -1.0)
    words = torch.full((codec.body_bytes(flat.numel()) // 4 - buckets,), 0x55555555).to(torch.int32)
    module.encode(flat, scales, words, runs, codec.alphabet, key)
    return scales, words


def compare(flat: torch.Tensor, scheme: QCS, key: int) -> None:
    codec, keys, backends = scheme.parts.default, [key, key + 1, 5], (reference_qcs, cpu_qcs)
    runs, alphabet = codec._runs(len(flat)), codec.alphabet
    assert_agree(
        [lambda m=m: encoded(m, flat, scheme, key) for m in backends],
        [
            lambda got, out, m=m: m.decode_add([got] * 3, keys, runs, alphabet, 1 / 3, out)
            for m in backends
        ],
        flat.numel(),
    )


@pytest.mark.parametrize("bucket", (1, 2, 16, 64, 512, 8192, 96, 100, 384))
def test_same_codes_and_sums_for_all_sizes(bucket):
    kinds = itertools.cycle((ordinary, heavy))
    ranges, estimators = itertools.cycle((0.5, 1, 2, 7, 127)), itertools.cycle(("unbiased", "mmse"))
    sizes = {0, 1, bucket - 1, bucket, bucket + bucket // 3, 2 * bucket + 97}
    for k, n in itertools.product(sorted({1, bucket // 9 + 1, bucket // 2 + 1, bucket}), sizes):
        own = {"quantizer_range": next(ranges), "estimator": next(estimators)}
        scheme = QCS(bucket_size=bucket, measurements=k, **own)
        compare(vector(next(kinds), n), scheme, n * 2654435761)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_same_codes_and_sums_for_all_kinds_of_vectors(kind):
    for bucket, q in ((64, 0.5), (100, 1), (1024, 127)):
        for k in (1, bucket // 3, bucket):
            scheme = QCS(bucket_size=bucket, measurements=k, quantizer_range=q)
            compare(vector(kind, 2 * bucket + bucket // 2), scheme, 2**64 - 1 - k)


def test_same_codes_and_sums_of_a_long_vector():
    compare(vector(heavy, 10**5 + 3), QCS(gain=21), key=12345)


def test_same_sums_of_hostile_scales_and_codes():
    scheme = QCS(bucket_size=64, measurements=40, quantizer_range=1)
    runs = scheme.parts.default._runs(300)
    _, words = encoded(cpu_qcs, vector(ordinary, 300), scheme, 1)
    words.fill_(-1)  # codes of 3, beyond the alphabet
    scales = torch.tensor([np.nan, np.inf, -1.0, 3e38, 0.0])
    results = [torch.ones(300), torch.ones(300)]
    for module, out in zip((reference_qcs, cpu_qcs), results, strict=True):
        module.decode_add([(scales, words)], [9], runs, 3, 1.0, out)
    assert same_bits(*results)


def test_too_short_words_are_refused():
    runs = QCS(bucket_size=64, quantizer_range=1).parts.default._runs(256)
    payload = torch.ones(4), torch.zeros(10, dtype=torch.int32)
    with pytest.raises(ValueError, match="too short"):
        cpu_qcs.decode_add([payload], [0], runs, 3, 1.0, torch.zeros(256))


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
    scales, words = encoded(cpu_qcs, flat, scheme, key)
    out, codec = torch.zeros(148), scheme.parts.default
    cpu_qcs.decode_add([(scales, words)], [key], codec._runs(148), codec.alphabet, 1.0, out)
    partial = -(-k // 2)
    estimates = []
    for bucket, (first, inside, n, rows) in enumerate(
        [(0, 0, 64, k), (0, 1, 64, k), (2, 0, 32, partial)]
    ):
        g = np.zeros(n)
        own = flat[bucket * 64 : bucket * 64 + n].double().numpy()
        g[: own.size] = own
        r, u = randomness(key, first, inside, n, rows)
        h = sylvester(n)[:rows]
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
