"""Kernels of schemes whose bodies are their own: Numba against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import KINDS, assert_agree, heavy, same_bits, vector
from unit_oracles import word_count

from hvd_adaptive.kernels import module
from hvd_adaptive.kernels.rice import rice_parameter

BACKENDS = ("reference", "numba")
SUBJECTS = ("natural", "onebit", *(f"sparse {density}" for density in (0.003, 0.05, 0.4, 1.0)))


def encoded(backend: str, subject: str, flat: torch.Tensor, bucket: int, key: int):
    """The sections of a body; what the kernel leaves unwritten is seen."""
    name, _, density = subject.partition(" ")
    encode, n = module(backend, name).encode, flat.numel()
    if name == "sparse":
        return encode(flat, bucket, float(density), rice_parameter(float(density)), key)
    words = torch.full((word_count(n, 2),), 0x55555555, dtype=torch.int32)
    if name == "onebit":
        first = torch.full((-(-n // bucket), 2), -7.0)
        encode(flat, first, words, bucket)
    else:
        first = torch.full((n,), 77, dtype=torch.uint8)
        encode(flat, first, words, bucket, key)
    return first, words


def add(backend: str, subject: str, bucket: int, sections, out: torch.Tensor) -> None:
    name, _, density = subject.partition(" ")
    if name == "sparse":
        for _ in range(2):
            added = module(backend, name).add(sections, bucket, rice_parameter(float(density)), out)
            assert added
    elif name == "onebit":
        module(backend, "bucket").decode_add([sections] * 3, bucket, 1 / 3, out)
    else:
        module(backend, name).decode_add([sections] * 3, 1 / 3, out)


def compare(subject: str, flat: torch.Tensor, bucket: int, key: int) -> None:
    assert_agree(
        [lambda b=b: encoded(b, subject, flat, bucket, key) for b in BACKENDS],
        [lambda sections, out, b=b: add(b, subject, bucket, sections, out) for b in BACKENDS],
        flat.numel(),
    )


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("bucket", (1, 7, 100, 512, 1000, 8192))
def test_same_bodies_and_sums_for_all_sizes(bucket, subject):
    last = 2000 if bucket > 7 else 130  # the reference is slow where buckets are many
    for n in sorted({0, 1, bucket - 1, bucket, bucket + 1, 63, 64, 65, 511, 512, 513, last}):
        compare(subject, vector(heavy, n), bucket, key=n * 2654435761)


@pytest.mark.many
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_same_bodies_and_sums_for_all_kinds_of_vectors(kind, subject):
    for bucket in (1, 100, 127, 128, 129, 512, 700):
        compare(subject, vector(kind, 3 * min(bucket, 400) + 1), bucket, key=2**64 - bucket)


@pytest.mark.parametrize("bucket", (1, 50))
def test_all_bit_patterns_are_powers_of_two_alike(bucket):
    bits = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint32)
    compare("natural", torch.from_numpy(bits.view(np.float32)), bucket, key=5)


def test_same_sums_of_all_powers_that_can_be_forged():
    sections = torch.arange(1024).to(torch.uint8), torch.arange(32, dtype=torch.int32) * 0x7654321
    sums = [torch.zeros(1024) for _ in BACKENDS]
    for backend, out in zip(BACKENDS, sums, strict=True):
        module(backend, "natural").decode_add([sections], 1.0, out)
    assert same_bits(*sums)


def test_constant_buckets_are_thinned_out_alike():
    for density in (0.1, 0.5, 0.999999, 1.0):
        compare(f"sparse {density}", torch.full((1000,), -0.3), 100, key=9)
