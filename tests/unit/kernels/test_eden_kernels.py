"""EDEN's kernels: Numba against the reference bit for bit, both against matrices in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kernel_cases import KINDS, assert_agree, heavy, ordinary, same_bits, vector
from test_hadamard import sylvester

from hvd_adaptive import EDEN
from hvd_adaptive.kernels.eden import shared_streams
from hvd_adaptive.kernels.numba import eden as fast
from hvd_adaptive.kernels.reference import eden as reference


def encoded(module, flat: torch.Tensor, codec, shared: int, own: int):
    buckets = codec._all(flat.numel())
    scales = torch.full((buckets.count,), -1.0)
    codes = codec._levels.codes(buckets.codes, buckets.size)
    words = torch.full((codec._packing.words(codes),), 0x55555555, dtype=torch.int32)
    module.encode(flat, scales, words, codec.settings.bucket_size, codec._levels, shared, own)
    return scales, words


def decoded(module, payloads, codec, owns, count: int) -> torch.Tensor:
    out = torch.linspace(-1, 1, count)
    size = codec.settings.bucket_size
    module.decode_add(payloads, size, codec._levels, 77, owns, out)
    return out


def compare(module, flat: torch.Tensor, codec, own: int) -> None:
    """A backend's module with the reference."""
    owns, size, backends = [own, own + 1, 5], codec.settings.bucket_size, (reference, module)
    assert_agree(
        [lambda m=m: encoded(m, flat, codec, 77, own) for m in backends],
        [
            lambda got, out, m=m: m.decode_add([got] * 3, size, codec._levels, 77, owns, out)
            for m in backends
        ],
        flat.numel(),
    )


@pytest.mark.parametrize("bucket", (64, 128, 512, 4096, 8192))
def test_same_codes_and_sums_for_all_sizes(bucket):
    kinds, bits = itertools.cycle((ordinary, heavy)), itertools.cycle((1, 3, 2))
    for n in (0, 1, 63, 65, bucket - 1, bucket, bucket + 1, 2 * bucket + 97, 9 * bucket // 2):
        codec = EDEN(bits=next(bits), bucket_size=bucket).parts.default
        compare(fast, vector(next(kinds), n), codec, n * 2654435761)


@pytest.mark.parametrize(("bits", "bucket"), ((0.5, 128), (0.25, 512), (0.125, 4096)))
def test_same_codes_and_sums_of_a_part_of_the_coordinates(bits, bucket):
    for n in (1, bucket - 1, bucket, 9 * bucket // 2, 9 * bucket + 65):
        compare(fast, vector(heavy, n), EDEN(bits=bits, bucket_size=bucket).parts.default, n)


@pytest.mark.parametrize(("bits", "kind"), list(zip(itertools.cycle(range(1, 9)), KINDS)))
def test_same_codes_and_sums_for_all_bits_and_kinds_of_vectors(bits, kind):
    for bucket in (64, 1024):
        codec = EDEN(bits=bits, bucket_size=bucket).parts.default
        compare(fast, vector(kind, 5 * bucket // 2), codec, 2**63 + bits)


def check_hostile_scales(module) -> None:
    codec = EDEN(bits=2, bucket_size=64).parts.default
    _, words = encoded(reference, vector(ordinary, 300), codec, 77, 1)
    scales = torch.tensor([np.nan, np.inf, -1.0, 3e38, 0.0])
    results = [decoded(m, [(scales, words)], codec, [1], 300) for m in (reference, module)]
    assert same_bits(*results)


def check_short_payloads(module) -> None:
    codec = EDEN(bits=2, bucket_size=64).parts.default
    scales, words = encoded(reference, vector(ordinary, 300), codec, 77, 1)
    for short in ((scales[:-1], words), (scales, words[:-1])):
        with pytest.raises(ValueError, match="too short"):
            decoded(module, [short], codec, [1], 300)


def test_hostile_scales_and_short_payloads():
    check_hostile_scales(fast)
    check_short_payloads(fast)


def rotation(stream: int, bucket: int, length: int) -> np.ndarray:
    """The orthogonal matrix of one rotation, in float64."""
    signs = reference._signs(stream, [bucket], length, torch.device("cpu"))[0].double().numpy()
    m = 1 << (length.bit_length() - 1)
    first, last = np.eye(length), np.eye(length)
    first[:m, :m] = sylvester(m) / m**0.5
    last[length - m :, length - m :] = sylvester(m) / m**0.5
    mixing = first if m == length else last @ first
    return mixing * signs


@pytest.mark.parametrize("n, size", [(128, 128), (100, 4096), (64, 64), (301, 512)])
@pytest.mark.parametrize("bits", (1, 5))
def test_encoding_and_decoding_follow_the_definition(n, size, bits):
    """Rotate by matrices, round to the nearest level, scale by S: all in float64."""
    codec, flat = EDEN(bits=bits, bucket_size=size).parts.default, vector(heavy, n)
    length = -(-n // 64) * 64
    x = np.zeros(length)
    x[:n] = flat.double().numpy()
    matrix = rotation(9, 0, length)
    for stream in reversed(shared_streams(77, bits)):
        matrix = matrix @ rotation(stream, 0, length)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(length), atol=1e-12)
    y = matrix @ x
    levels = codec._levels.values.astype(np.float64)
    normal = y / np.sqrt(y @ y / length)
    q = levels[np.abs(normal[:, None] - levels).argmin(axis=1)]
    scale = y @ y / (y @ q)
    scales, words = encoded(fast, flat, codec, 77, 9)
    assert scales.item() == pytest.approx(scale, rel=1e-5)
    out = torch.zeros(n)
    fast.decode_add([(scales, words)], size, codec._levels, 77, [9], out)
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
