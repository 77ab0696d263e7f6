"""EDEN's Triton kernels against the reference, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import triton_interpreter  # noqa: F401
from kernel_cases import KINDS, heavy, ordinary, vector
from test_eden_kernels import check_hostile_scales, check_short_payloads, compare

from hvd_adaptive import EDEN
from hvd_adaptive.kernels.triton import eden as cuda
from hvd_adaptive.kernels.triton import rotation


@pytest.mark.parametrize("bucket", (64, 512, 4096))
def test_same_codes_and_sums_for_all_sizes(bucket):
    kinds, bits = itertools.cycle((ordinary, heavy)), itertools.cycle((1, 3, 2))
    for n in (0, 1, bucket - 1, 2 * bucket + 97) if bucket < 4096 else (bucket + 97,):
        codec = EDEN(bits=next(bits), bucket_size=bucket).parts.default
        compare(cuda, vector(next(kinds), n), codec, n * 2654435761)


def test_buckets_that_no_tile_holds(monkeypatch):
    monkeypatch.setattr(rotation, "LARGEST", 256)
    compare(cuda, vector(heavy, 1100), EDEN(bits=2, bucket_size=512).parts.default, 3)


@pytest.mark.parametrize(("bits", "bucket"), ((0.5, 128), (0.125, 1024)))
def test_same_codes_and_sums_of_a_part_of_the_coordinates(bits, bucket):
    for n in (bucket - 1, 2 * bucket + 65):
        compare(cuda, vector(heavy, n), EDEN(bits=bits, bucket_size=bucket).parts.default, n)


@pytest.mark.many
@pytest.mark.parametrize(("bits", "kind"), list(zip(itertools.cycle(range(1, 9)), KINDS)))
def test_same_codes_and_sums_for_all_bits_and_kinds_of_vectors(bits, kind):
    compare(cuda, vector(kind, 160), EDEN(bits=bits, bucket_size=128).parts.default, 2**63 + bits)


def test_hostile_scales_and_short_payloads():
    check_hostile_scales(cuda)
    check_short_payloads(cuda)
