"""EDEN's Triton kernels against the reference, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401
from kernel_cases import KINDS, heavy, ordinary, same_bits, vector
from test_eden_kernels import decoded, encoded

from hvd_adaptive import EDEN
from hvd_adaptive.kernels.reference import eden as reference
from hvd_adaptive.kernels.triton import eden as cuda


def compare(flat: torch.Tensor, codec, own: int) -> None:
    want, got = (encoded(module, flat, codec, 77, own) for module in (reference, cuda))
    assert same_bits(want[0], got[0]) and torch.equal(want[1], got[1])
    owns = [own, own + 1, 5]
    results = [decoded(m, [want] * 3, codec, owns, flat.numel()) for m in (reference, cuda)]
    assert same_bits(*results)


@pytest.mark.parametrize("bucket", (64, 128, 512, 4096))
def test_same_codes_and_sums_for_all_sizes(bucket):
    kinds, bits = itertools.cycle((ordinary, heavy)), itertools.cycle((1, 3, 2))
    for n in (0, 1, bucket - 1, bucket, 2 * bucket + 97):
        codec = EDEN(bits=next(bits), bucket_size=bucket).parts.default
        compare(vector(next(kinds), n), codec, n * 2654435761)


def test_buckets_that_no_tile_holds():
    compare(vector(heavy, 40_000), EDEN(bits=2, bucket_size=1 << 15).parts.default, 3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_same_codes_and_sums_for_all_bits(bits):
    compare(vector(heavy, 600), EDEN(bits=bits, bucket_size=256).parts.default, 2**63 + bits)


@pytest.mark.parametrize("bits", (0.5, 0.25, 0.125))
@pytest.mark.parametrize("bucket", (128, 1024))
def test_same_codes_and_sums_of_a_part_of_the_coordinates(bits, bucket):
    if bits * bucket >= 64:
        for n in (1, bucket - 1, 9 * bucket + 65 if bucket < 1024 else 2 * bucket + 65):
            compare(vector(heavy, n), EDEN(bits=bits, bucket_size=bucket).parts.default, n)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_same_codes_and_sums_for_all_kinds_of_vectors(kind):
    compare(vector(kind, 320), EDEN(bits=2, bucket_size=128).parts.default, 9)


def test_same_sums_of_hostile_scales():
    codec = EDEN(bits=2, bucket_size=64).parts.default
    _, words = encoded(reference, vector(ordinary, 300), codec, 77, 1)
    scales = torch.tensor([np.nan, np.inf, -1.0, 3e38, 0.0])
    results = [decoded(m, [(scales, words)], codec, [1], 300) for m in (reference, cuda)]
    assert same_bits(*results)


def test_short_payloads_are_refused():
    codec = EDEN(bits=2, bucket_size=64).parts.default
    scales, words = encoded(reference, vector(ordinary, 300), codec, 77, 1)
    for short in ((scales[:-1], words), (scales, words[:-1])):
        with pytest.raises(ValueError, match="too short"):
            decoded(cuda, [short], codec, [1], 300)
