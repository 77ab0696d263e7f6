"""EDEN's Triton kernels against the reference, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton_interpreter  # noqa: F401
from kernel_cases import KINDS, add_hostile_bodies_alike, agree, heavy, ordinary, served_by, vector

from hvd_adaptive import EDEN
from hvd_adaptive.kernels.triton import rotation


@pytest.mark.parametrize("bucket", (64, 512, 4096))
def test_same_codes_and_sums_for_all_sizes(bucket):
    kinds, bits = itertools.cycle((ordinary, heavy)), itertools.cycle((1, 3, 2))
    for n in (0, 1, bucket - 1, 2 * bucket + 161) if bucket < 4096 else (bucket + 161,):
        codec = EDEN(bits=next(bits), bucket_size=bucket).parts.default
        agree(codec, vector(next(kinds), n), n * 2654435761, "triton")


def test_buckets_that_no_tile_holds(monkeypatch):
    monkeypatch.setattr(rotation, "LARGEST", 256)
    agree(EDEN(bits=2, bucket_size=512).parts.default, vector(heavy, 1300), 3, "triton")


@pytest.mark.parametrize(("bits", "bucket"), ((0.5, 128), (0.125, 1024)))
def test_same_codes_and_sums_of_a_part_of_the_coordinates(bits, bucket):
    for n in (bucket - 1, 2 * bucket + 161):
        agree(EDEN(bits=bits, bucket_size=bucket).parts.default, vector(heavy, n), n, "triton")


@pytest.mark.many
@pytest.mark.parametrize(("bits", "kind"), list(zip(itertools.cycle(range(1, 9)), KINDS)))
def test_same_codes_and_sums_for_all_bits_and_kinds_of_vectors(bits, kind):
    codec = EDEN(bits=bits, bucket_size=128).parts.default
    agree(codec, vector(kind, 160), 2**63 + bits, "triton")


def test_hostile_scales_and_short_payloads():
    codec = EDEN(bits=2, bucket_size=64).parts.default
    add_hostile_bodies_alike(codec, 8, "triton")
    body = codec._body(vector(ordinary, 300), 1)
    with served_by("triton"), pytest.raises(ValueError, match="too short"):
        codec.add_bodies([body[:-4]], [1], 1.0, torch.zeros(300))
