"""1-bit SGD: kernels bit for bit, the means of both sides, payloads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from kernel_cases import KINDS, heavy, ordinary, same_bits, vector

from hvd_adaptive import OneBitSGD
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


def test_same_codes_and_sums_for_all_sizes():
    for bucket in (1, 7, 100, 512, 1000, 8192):
        for n in sorted({0, 1, bucket - 1, bucket, bucket + 1, 63, 64, 65, 511, 512, 513, 9000}):
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
    negative = -flat.abs() - 1
    one_side = scheme.decode(scheme.encode(negative, seed=1))[:BUCKET]
    np.testing.assert_allclose(one_side, negative[:BUCKET].double().mean(), rtol=1e-6)
    assert torch.equal(scheme.encode(flat, seed=1)[96:], scheme.encode(flat, seed=2)[96:])


def test_enormous_and_tiny_means_do_not_overflow_or_vanish():
    scheme = OneBitSGD(error_feedback=None)
    for size in (3.4e38, 1e-40):
        flat = torch.full((2000,), size)
        flat[::3] = -size / 2
        assert torch.equal(scheme.decode(scheme.encode(flat)), flat)


def test_error_feedback_is_on_and_changes_no_payload():
    assert OneBitSGD().settings.error_feedback == 1.0
    flat = vector(heavy, 500)
    with_feedback, without = OneBitSGD(), OneBitSGD(error_feedback=None)
    assert torch.equal(
        with_feedback.decode(without.encode(flat)),
        without.parts.default.payloads.roundtrip(flat, 0),
    )


def test_wrong_keywords():
    with pytest.raises(TypeError, match=r"OneBitSGD\(\) has no keyword 'bits'"):
        OneBitSGD(bits=1)
    with pytest.raises(ValueError, match="error_feedback='on'"):
        OneBitSGD(error_feedback="on")
