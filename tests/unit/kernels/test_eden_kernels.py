"""EDEN's kernels against the matrices of tests/oracle, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kernel_cases import heavy, vector

from hvd_adaptive import EDEN
from hvd_adaptive.kernels.reference import eden as reference

from oracle import rotated  # isort: skip


@pytest.mark.parametrize(("n", "size"), [(128, 128), (1, 512), (100, 4096), (1060, 512)])
@pytest.mark.parametrize("bits", (0.5, 1, 5))
def test_encoding_and_decoding_follow_the_definition(n, size, bits):
    """Rotate by matrices, round to the nearest level, scale by S: all in float64."""
    codec, flat = EDEN(bits=bits, bucket_size=size).parts.default, vector(heavy, n)
    out = torch.zeros(n)
    codec.add_bodies([codec._body(flat, 9)], [9], 1.0, out)
    expected = rotated.estimate(flat.numpy(), bits, size, codec._shared, 9)
    np.testing.assert_allclose(out.numpy(), expected, atol=2e-5 * np.abs(expected).max())


def test_signs_are_fair_and_differ():
    """Sums of 2**16 signs, of a bucket, between buckets and streams: within 5 standard errors."""
    device, count = torch.device("cpu"), 1 << 16
    signs = {
        (stream, bucket): reference._signs(stream, [bucket], count, device)[0]
        for stream in (1, 2)
        for bucket in (0, 1)
    }
    for own in signs.values():
        assert set(own.tolist()) == {-1.0, 1.0}
        assert abs(own.sum()) < 5 * 256
        for apart in (1, 16, 128, 4096):
            assert abs((own[apart:] * own[:-apart]).sum()) < 5 * 256
    for a, b in itertools.combinations(signs.values(), 2):
        assert abs((a * b).sum()) < 5 * 256
