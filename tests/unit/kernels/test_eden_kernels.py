"""EDEN's kernels against matrices in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kernel_cases import heavy, vector
from test_hadamard import sylvester

from hvd_adaptive import EDEN
from hvd_adaptive.kernels.eden import shared_streams
from hvd_adaptive.kernels.random import Inside, stream_key
from hvd_adaptive.kernels.reference import eden as reference


def rotation(stream: int, bucket: int, length: int) -> np.ndarray:
    """The orthogonal matrix of one rotation, in float64."""
    numbers = range(bucket, bucket + 4)
    signs = reference._signs(stream, numbers, length, torch.device("cpu")).double().numpy()
    m = 1 << (length.bit_length() - 1)
    first, last = np.eye(length), np.eye(length)
    first[:m, :m] = sylvester(m) / m**0.5
    last[length - m :, length - m :] = sylvester(m) / m**0.5
    if m == length:
        return first * signs[0]
    shift = np.roll(np.eye(length), m * m // length, axis=0)
    once, again = ((last * signs[c + 1]) @ (first * signs[c]) for c in (0, 2))
    return shift @ again @ shift @ once


@pytest.mark.parametrize("n, size", [(128, 128), (100, 4096), (64, 64), (301, 512)])
@pytest.mark.parametrize("bits", (1, 5))
def test_encoding_and_decoding_follow_the_definition(n, size, bits):
    """Rotate by matrices, round to the nearest level, scale by S: all in float64."""
    codec, flat = EDEN(bits=bits, bucket_size=size).parts.default, vector(heavy, n)
    length = -(-n // 64) * 64
    x = np.zeros(length)
    x[:n] = flat.double().numpy()
    matrix = rotation(stream_key(9, Inside.ROTATION), 0, length)
    for stream in reversed(shared_streams(codec._shared, bits)):
        matrix = matrix @ rotation(stream, 0, length)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(length), atol=1e-12)
    y = matrix @ x
    levels = codec._levels.values.astype(np.float64)
    normal = y / np.sqrt(y @ y / length)
    q = levels[np.abs(normal[:, None] - levels).argmin(axis=1)]
    scale = y @ y / (y @ q)
    body, out = codec._body(flat, 9), torch.zeros(n)
    assert codec._split(body, n)[0].item() == pytest.approx(scale, rel=1e-5)
    codec.add_bodies([body], [9], 1.0, out)
    expected = (scale * matrix.T @ q)[:n]
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
