"""Checksums that encoders of the CPU begin: the same as of the whole payload, summed anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scheme_cases import schemes

from hvd_adaptive import Tuning
from hvd_adaptive.coding.header import CHECKSUM_AT, SIZE, body_seed
from hvd_adaptive.coding.payload import arrived
from hvd_adaptive.kernels.checksum import BlockSums
from hvd_adaptive.kernels.reference import checksum as reference

# Packed by whole bits, and several codes to a number; tables counted, searched, uniform and not.
SCHEMES = schemes("alq-3", "alq-8-symmetric", "nuqsgd-4", "qsgd-2", "qsgd-3", "qsgd-8", "natural")
# The last two: a section of scales as long as two blocks and some words.
SIZES = ((1, 512), (4096, 512), (16_384, 512), (131_071, 512), (200_003, 8192), (300_000, 33))


def sums_of(scheme, n: int) -> BlockSums:
    body = torch.empty(scheme.parts.default.body_bytes(n), dtype=torch.uint8)
    return scheme.parts.default.encode_body(torch.linspace(-1, 1, n), body, 1)


@pytest.mark.many
@pytest.mark.parametrize("n, bucket_size", SIZES)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_payload_has_the_checksum_of_its_bytes(name, n, bucket_size):
    scheme = SCHEMES[name](bucket_size=bucket_size)
    flat = torch.from_numpy(np.random.default_rng(n).normal(size=n).astype(np.float32))
    for full in (0, min(n - 1, 777)):
        payload = scheme.parts.default.payloads.encode(flat, n - full, 5).bytes
        data = payload.numpy().tobytes()
        seed = body_seed(arrived([payload])[0].header.pack())
        words = torch.from_numpy(np.frombuffer(data[SIZE:], "<i4").copy())
        placed = int.from_bytes(data[CHECKSUM_AT : CHECKSUM_AT + 4], "little")
        assert placed == reference.checksum(words, seed) != 0


@pytest.mark.parametrize("name", SCHEMES)
def test_encoders_sum_all_blocks_but_the_first_and_last(name):
    scheme = SCHEMES[name](bucket_size=8192)
    sums = sums_of(scheme, 2_000_000)
    assert sums.size == scheme.parts.default.body_bytes(2_000_000)
    runs = len(sums.summed) // 2  # natural compression: of exponents and signs, one between them
    count = sum(sums.summed[1::2] - sums.summed[::2])
    assert count >= sums.size // 4 // 4096 - runs and sums.sums.any()


@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_is_summed_for_payloads_without_checksum_or_that_are_coded(name):
    scheme = SCHEMES[name](bucket_size=8192, tuning=Tuning(checksum=False))
    assert sums_of(scheme, 100_000) is None
    if "huffman" in scheme.parts.default.codings:
        coded = SCHEMES[name](coding="huffman")
        coded.fit(torch.randn(100_000))
        assert coded.parts.default.coder is not None and sums_of(coded, 100_000) is None
