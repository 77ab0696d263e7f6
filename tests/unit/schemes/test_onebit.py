"""1-bit SGD: kernels bit for bit, the means of both sides, payloads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from kernel_cases import KINDS, heavy, ordinary, same_bits, vector

from hvd_adaptive import OneBitSGD, PayloadError
from hvd_adaptive.kernels.numba import bucket as cpu_bucket
from hvd_adaptive.kernels.numba import onebit as cpu_onebit
from hvd_adaptive.kernels.reference import bucket as reference_bucket
from hvd_adaptive.kernels.reference import onebit as reference_onebit

BUCKET = 500
MODULES = (reference_onebit, cpu_onebit)
DECODERS = (reference_bucket, cpu_bucket)


def encoded(module, flat: torch.Tensor, bucket: int):
    means = torch.full((-(-flat.numel() // bucket), 2), -7.0)
    words = torch.full((oracle.word_count(flat.numel(), 2),), 0x55555555, dtype=torch.int32)
    module.encode(flat, means, words, bucket)
    return means, words


def compare(flat: torch.Tensor, bucket: int) -> None:
    want, got = (encoded(module, flat, bucket) for module in MODULES)
    assert same_bits(want[0], got[0]) and torch.equal(want[1], got[1]), (flat.numel(), bucket)
    results = []
    for module in DECODERS:
        out = torch.linspace(-1, 1, flat.numel())
        module.decode_add([got] * 3, bucket, 1 / 3, out)
        results.append(out)
    assert same_bits(*results), (flat.numel(), bucket)


@pytest.mark.parametrize("bucket", (1, 7, 100, 512, 1000, 8192))
def test_same_codes_and_sums_for_all_sizes(bucket):
    for n in sorted({0, 1, bucket - 1, bucket, bucket + 1, 63, 64, 65, 511, 512, 513, 20_000}):
        compare(vector(heavy, n), bucket)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_same_codes_and_sums_for_all_kinds_of_vectors(kind):
    for bucket in (1, 100, 127, 128, 129, 700):
        compare(vector(kind, 3 * min(bucket, 400) + 1), bucket)


def two_means(bucket: np.ndarray) -> np.ndarray:
    """Each coordinate's side's mean, in float64 (extended sums)."""
    below = bucket < 0
    result = np.empty_like(bucket)
    for side in (below, ~below):
        if side.any():
            result[side] = np.mean(bucket[side].astype(np.longdouble))
    return result


@pytest.mark.parametrize("kind", (ordinary, heavy))
def test_each_side_becomes_its_mean(kind):
    flat = vector(kind, 2 * BUCKET + 77)
    scheme = OneBitSGD(bucket_size=BUCKET, error_feedback=None)
    parts = np.split(flat.double().numpy(), [BUCKET, 2 * BUCKET])
    want = np.concatenate([two_means(part) for part in parts])
    decoded = scheme.decode(scheme.encode(flat))
    np.testing.assert_array_equal(decoded.numpy(), want.astype(np.float32))


def test_what_is_left_is_the_variance_within_the_sides_and_no_values_do_better():
    flat = vector(ordinary, BUCKET)
    exact, below = flat.double().numpy(), flat.numpy() < 0
    scheme = OneBitSGD(bucket_size=BUCKET, error_feedback=None)
    decoded = scheme.decode(scheme.encode(flat)).double().numpy()
    sides = (exact[below], exact[~below])
    within = (exact**2).sum() - sum(len(s) * s.mean() ** 2 for s in sides)
    error = ((decoded - exact) ** 2).sum()
    np.testing.assert_allclose(error, within, rtol=1e-5)
    np.testing.assert_allclose(decoded.sum(), exact.sum(), atol=1e-4)
    low, high = decoded[below][0], decoded[~below][0]
    for change in (0.99, 1.01):
        assert ((np.where(below, low * change, high) - exact) ** 2).sum() > error
        assert ((np.where(below, low, high * change) - exact) ** 2).sum() > error


def test_enormous_and_tiny_means_do_not_overflow_or_vanish():
    scheme = OneBitSGD(error_feedback=None)
    for size in (3.4e38, 1e-40):
        flat = torch.full((2000,), size)
        flat[::3] = -size / 2
        assert torch.equal(scheme.decode(scheme.encode(flat)), flat)


def test_sides_that_are_empty_and_zero_buckets():
    scheme = OneBitSGD(bucket_size=100, error_feedback=None)
    zeros = torch.zeros(250)
    zeros[::2] = -0.0
    assert not scheme.decode(scheme.encode(zeros)).any()
    negative = torch.full((250,), -3.0)
    assert torch.equal(scheme.decode(scheme.encode(negative)), negative)


@pytest.mark.parametrize("n", (0, 1, BUCKET - 1, BUCKET, BUCKET + 1, 3000))
@pytest.mark.parametrize("tail", ("quantize", "full"))
def test_lengths(n, tail):
    scheme = OneBitSGD(bucket_size=BUCKET, tail=tail, error_feedback=None)
    full = n % BUCKET if tail == "full" else 0
    body = 8 * -(-(n - full) // BUCKET) + 4 * oracle.word_count(n - full, 2)
    payload = scheme.encode(vector(heavy, n))
    assert payload.numel() == 96 + -(-body // 8) * 8 + -(-full * 4 // 8) * 8
    decoded = scheme.decode(payload)
    assert decoded.numel() == n and torch.equal(decoded[n - full :], vector(heavy, n)[n - full :])


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_a_bucket_that_is_not_finite_becomes_nan(bad):
    flat = vector(heavy, 3 * BUCKET)
    flat[BUCKET + 17] = bad
    scheme = OneBitSGD(bucket_size=BUCKET, error_feedback=None)
    spoilt = scheme.decode(scheme.encode(flat)).isnan()
    assert spoilt[BUCKET : 2 * BUCKET].all() and spoilt.sum() == BUCKET


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_dtypes(dtype):
    flat = vector(ordinary, 1000).to(dtype)
    scheme = OneBitSGD(error_feedback=None)
    decoded = scheme.decode(scheme.encode(flat))
    want = torch.from_numpy(two_means(flat.double().numpy()).astype(np.float32)).to(dtype)
    assert decoded.dtype == dtype and torch.equal(decoded, want)


def test_clipping_comes_first():
    flat = torch.full((BUCKET,), 1.0)
    flat[:10] = 1000.0
    limit = 0.5 * float(flat.double().square().mean().sqrt())
    scheme = OneBitSGD(bucket_size=BUCKET, clip=0.5, error_feedback=None)
    want = (490 + 10 * limit) / 500
    np.testing.assert_allclose(scheme.decode(scheme.encode(flat)), want, rtol=1e-5)


def test_error_feedback_is_on_and_changes_no_payload():
    assert OneBitSGD().settings.error_feedback == 1.0
    flat = vector(heavy, 500)
    with_feedback, without = OneBitSGD(), OneBitSGD(error_feedback=None)
    assert torch.equal(
        with_feedback.decode(without.encode(flat)),
        without.parts.default.payloads.roundtrip(flat, 0),
    )


def test_wrong_keywords_and_foreign_payloads():
    with pytest.raises(TypeError, match=r"OneBitSGD\(\) has no keyword 'bits'"):
        OneBitSGD(bits=1)
    with pytest.raises(ValueError, match="error_feedback='on'"):
        OneBitSGD(error_feedback="on")
    payload = OneBitSGD(bucket_size=100, error_feedback=None).encode(vector(heavy, 300))
    with pytest.raises(PayloadError, match="bucket size 100"):
        OneBitSGD(error_feedback=None).decode(payload)


def test_nothing_is_random_and_the_state_survives():
    ours = OneBitSGD(error_feedback=None)
    theirs = OneBitSGD(error_feedback=None, seed=5)
    flat = vector(heavy, 500)
    assert torch.equal(ours.encode(flat, seed=1)[96:], theirs.encode(flat, seed=2)[96:])
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
