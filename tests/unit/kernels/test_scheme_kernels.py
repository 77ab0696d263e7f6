"""Schemes' bodies, made and added up by Numba's kernels and by the reference: the same bits."""

from __future__ import annotations

import itertools
import os
from functools import partial

import numpy as np
import pytest
import torch
from kernel_cases import KINDS, add_alike, add_hostile_bodies_alike, agree, heavy, ordinary, vector

from hvd_adaptive import EDEN, QCS, QSGD, LinearQuantile, NaturalCompression, OneBitSGD

ANY = (1, 7, 100, 512, 1000, 8192)
# Some are not compiled at set-up: `make ranks` runs all.
EVERY = "HVD_ADAPTIVE_EVERY_CASE" in os.environ
LEVELS = (2, 3, 4, 5, 9, 17, *((10, 65, 250, 256) if EVERY else ()))
INTERVALS = (1, 2, 3, 4, *((5,) if EVERY else ()), 7, 15, 31, 63, 127)
RANGES = ((0, 0.5, "unbiased"), (1 / 9, 1, "mmse"), (0.4, 127, "unbiased"), (0.6, 2, "unbiased"))


def qcs(share: float, quantizer_range: float, estimator: str, bucket_size: int) -> QCS:
    """share: measurements of a coordinate; one of a bucket at least."""
    k = max(1, round(share * bucket_size))
    own = {"quantizer_range": quantizer_range, "estimator": estimator}
    return QCS(measurements=k, bucket_size=bucket_size, **own)


# Each with the sizes of its buckets.
SCHEMES = {
    "natural": (NaturalCompression, ANY),
    "onebit": (partial(OneBitSGD, error_feedback=None), ANY),
    **{f"qsgd-{s}": (partial(QSGD, intervals=s, norm="linf"), (1000,)) for s in INTERVALS},
    **{f"quantile-{n}": (partial(LinearQuantile, levels=n), (7, 512)) for n in LEVELS},
    **{f"eden-{b}": (partial(EDEN, bits=b), (64, 128, 1024, 8192)) for b in range(1, 9)},
    **{f"eden-1/{round(1 / b)}": (partial(EDEN, bits=b), (512, 4096)) for b in (0.5, 0.25, 0.125)},
    **{
        f"qcs-{own[0]:.1f}-{own[1]}": (partial(qcs, *own), (1, 2, 16, 64, 512, 8192, 96, 100, 384))
        for own in (*RANGES, (1, 7, "mmse"))
    },
}


@pytest.mark.parametrize("label", SCHEMES)
def test_same_bodies_and_sums_for_all_sizes(label):
    make, buckets = SCHEMES[label]
    kinds = itertools.cycle((ordinary, heavy))
    for bucket in buckets:
        codec = make(bucket_size=bucket).parts.default
        last = (
            2 * bucket + 97 if bucket > 7 else 130
        )  # the reference is slow where buckets are many
        for n in {0, 1, bucket - 1, bucket, bucket + bucket // 3, 63, 64, 65, 511, 513, last}:
            agree(codec, vector(next(kinds), n), key=n * 2654435761)


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("label", SCHEMES)
def test_same_bodies_and_sums_for_all_kinds_of_vectors(label, kind):
    make, buckets = SCHEMES[label]
    for bucket in buckets[:-1] or buckets:
        flat = vector(kind, 5 * min(bucket, 400) // 2 + 1)
        agree(make(bucket_size=bucket).parts.default, flat, key=2**64 - bucket)


@pytest.mark.parametrize("label", ("quantile-9", "qcs-0.6-2", "eden-2"))
def test_same_bodies_and_sums_of_a_long_vector(label):
    codec = SCHEMES[label][0](bucket_size=8192).parts.default
    agree(codec, vector(heavy, 10**5 + 3), key=12345)


# With the bytes before their scales.
@pytest.mark.parametrize(("label", "at"), (("eden-2", 8), ("qcs-0.6-2", 0), ("qcs-0.1-1", 0)))
def test_same_sums_of_hostile_scales_and_codes(label, at):
    add_hostile_bodies_alike(SCHEMES[label][0](bucket_size=64).parts.default, at)


@pytest.mark.parametrize("label", ("eden-2", "qcs-0.6-2", "quantile-9", "qsgd-4"))
def test_too_short_bodies_are_refused(label):
    codec = SCHEMES[label][0](bucket_size=64).parts.default
    body = codec._body(vector(ordinary, 300), 1)
    with pytest.raises(ValueError, match="too short"):
        codec.decode_bodies([body[:-4]], [1], 1.0, torch.zeros(300))


@pytest.mark.parametrize("bucket", (1, 50))
def test_all_bit_patterns_are_powers_of_two_alike(bucket):
    bits = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint32)
    codec = NaturalCompression(bucket_size=bucket).parts.default
    agree(codec, torch.from_numpy(bits.view(np.float32)), key=5)


def test_same_sums_of_all_powers_that_can_be_forged():
    signs = torch.arange(32, dtype=torch.int32) * 0x7654321
    body = torch.cat([torch.arange(1024).to(torch.uint8), signs.view(torch.uint8)])
    add_alike(NaturalCompression().parts.default, [body], [0], 1024)
