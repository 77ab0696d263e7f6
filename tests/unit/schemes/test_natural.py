"""Natural compression: kernels bit for bit, unbiased rounding, variance, payloads."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from kernel_cases import KINDS, heavy, same_bits, vector

from hvd_adaptive import NaturalCompression, PayloadError
from hvd_adaptive.kernels.numba import natural as cpu_natural
from hvd_adaptive.kernels.reference import natural as reference_natural

BUCKET = 500
LARGEST = float(np.finfo(np.float32).max)
MODULES = (reference_natural, cpu_natural)


def encoded(module, flat: torch.Tensor, bucket: int, key: int):
    exponents = torch.full((flat.numel(),), 77, dtype=torch.uint8)
    words = torch.full((oracle.word_count(flat.numel(), 2),), 0x55555555, dtype=torch.int32)
    module.encode(flat, exponents, words, bucket, key)
    return exponents, words


def compare(flat: torch.Tensor, bucket: int, key: int) -> None:
    want, got = (encoded(module, flat, bucket, key) for module in MODULES)
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1]), (flat.numel(), bucket)
    results = []
    for module in MODULES:
        out = torch.linspace(-1, 1, flat.numel())
        module.decode_add([got] * 3, 1 / 3, out)
        results.append(out)
    assert same_bits(*results), (flat.numel(), bucket)


def test_same_codes_and_sums_for_all_sizes():
    for bucket in (1, 7, 100, 512, 1000, 8192):
        for n in sorted({0, 1, bucket - 1, bucket, bucket + 1, 63, 64, 65, 511, 512, 513, 9000}):
            compare(vector(heavy, n), bucket, key=n * 2654435761)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_same_codes_and_sums_for_all_kinds_of_vectors(kind):
    for bucket in (1, 100, 512, 700):
        compare(vector(kind, 3 * min(bucket, 400) + 1), bucket, key=2**64 - bucket)


def test_same_codes_and_sums_for_all_bit_patterns():
    bits = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint32)
    for bucket in (1, 50):
        compare(torch.from_numpy(bits.view(np.float32)), bucket, key=5)


def test_same_sums_of_all_payloads_that_can_be_forged():
    exponents = torch.arange(1024, dtype=torch.int64).to(torch.uint8)
    words = torch.arange(32, dtype=torch.int32) * 0x7654321
    sums = [torch.zeros(1024) for _ in MODULES]
    for module, out in zip(MODULES, sums, strict=True):
        module.decode_add([(exponents, words)], 1.0, out)
    assert same_bits(*sums)


def rounded(value: float, u: int) -> float:
    """C_nat in exact arithmetic: up where u/2**24 is below the distance from the lower power."""
    size = abs(value)
    if size < 2.0**-126:
        lower, upper = 0.0, 2.0**-126
    else:
        lower = 2.0 ** (np.frexp(size)[1] - 1)
        upper = 2 * lower
    up = u < (size - lower) / (upper - lower) * 2**24
    return float(np.copysign(min(upper if up else lower, LARGEST), value))


def test_each_coordinate_is_rounded_as_its_random_integer_says():
    flat = vector(heavy, 2 * BUCKET + 77)
    flat[::9], flat[4], flat[7] = 0.0, 3e38, -1e-39
    scheme = NaturalCompression(bucket_size=BUCKET)
    payload = scheme.encode(flat, seed=11)
    key = oracle.read_field(payload.numpy().tobytes(), "key")
    sizes = (BUCKET, BUCKET, 77)
    u = [x for b, n in enumerate(sizes) for x in oracle.uniform_integers(key, b, n)]
    want = [rounded(v, x) for v, x in zip(flat.tolist(), u, strict=True)]
    np.testing.assert_array_equal(scheme.decode(payload).numpy(), np.array(want, np.float32))


def draws(flat: torch.Tensor, repeats: int) -> np.ndarray:
    scheme = NaturalCompression(bucket_size=BUCKET)
    return np.array(
        [scheme.decode(scheme.encode(flat, seed=s)).double().numpy() for s in range(repeats)]
    )


def test_unbiased_with_the_variance_of_the_two_powers():
    """Mean and squared error of 600 encodings within 5 standard errors; at most 1/8."""
    flat, repeats = vector(heavy, 3 * BUCKET + 10), 600
    exact = flat.double().numpy()
    lower = 2.0 ** (np.frexp(np.abs(exact))[1] - 1)
    below, above = np.abs(exact) - lower, 2 * lower - np.abs(exact)
    variance = below * above
    assert variance.sum() <= (exact**2).sum() / 8
    weights = np.random.default_rng(1).choice([-1.0, 1.0], exact.size) / np.abs(exact)
    decoded = draws(flat, repeats)
    error = ((decoded - exact) @ weights).mean()
    assert abs(error) < 5 * np.sqrt((variance * weights**2).sum() / repeats)
    spread = (variance * (above - below) ** 2 / exact**4).sum()
    squared = (np.square(decoded - exact) / exact**2).sum(axis=1).mean()
    assert abs(squared - (variance / exact**2).sum()) < 5 * np.sqrt(spread / repeats)


@pytest.mark.parametrize(
    ("value", "neighbours"),
    [
        (2.0**-126 * 0.3, (0, 2.0**-126)),
        (-(2.0**-126) * 0.7, (0, 2.0**-126)),
        (2.0**-126 * 1.4, (2.0**-126, 2.0**-125)),
        (4 / 3, (1, 2)),
        (2.0**127 * 1.25, (2.0**127, LARGEST)),
        (-LARGEST, (2.0**127, LARGEST)),
    ],
)
def test_unbiased_at_the_ends_of_the_range(value, neighbours):
    flat = torch.full((40_000,), np.float32(value))
    exact = float(flat[0])
    decoded = draws(flat, 1)[0]
    assert set(np.abs(decoded)) <= set(neighbours)
    low, high = neighbours
    deviation = np.sqrt((abs(exact) - low) * (high - abs(exact)) / flat.numel())
    assert abs(decoded.mean() - exact) <= 5 * deviation + abs(exact) * 2.0**-23
    if low == 1:  # where the bound of 1/8 is reached: squared errors of 1/9 and 4/9
        error = np.square(decoded - exact).mean() / exact**2
        assert abs(error - 1 / 8) < 5 * np.sqrt(2 / 81 / flat.numel()) / exact**2


def test_powers_of_two_and_zeros_stay_as_they_are():
    powers = torch.from_numpy(2.0 ** np.arange(-126.0, 128.0)).to(torch.float32)
    flat = torch.cat([powers, -powers, torch.zeros(600), -torch.zeros(3)])
    decoded = draws(flat, 1)[0]
    np.testing.assert_array_equal(decoded, flat.double().numpy())
    assert not np.signbit(decoded[-603:]).any()


def test_wrong_keywords_and_sizes():
    with pytest.raises(TypeError, match=r"NaturalCompression\(\) has no keyword 'bits'"):
        NaturalCompression(bits=9)
    with pytest.raises(ValueError, match="bucket_size=0: must be an integer from 1"):
        NaturalCompression(bucket_size=0)
    scheme = NaturalCompression()
    assert scheme.parts.default.body_bytes(512 * 1000) * 8 == 9 * 512 * 1000
    payload = scheme.encode(vector(heavy, 300)).numpy().tobytes()
    forged = oracle.forge(payload, coordinates=301 + 512)
    with pytest.raises(PayloadError):
        scheme.decode(torch.from_numpy(np.frombuffer(forged, np.uint8).copy()))


def test_forged_codes_decode_to_nan_or_powers():
    scheme = NaturalCompression()
    payload = bytearray(scheme.encode(torch.ones(512), seed=0).numpy().tobytes())
    payload[96] = 255
    payload[97] = 0
    struct.pack_into("<I", payload, 96 + 512, 0xFFFFFFFF)
    forged = torch.from_numpy(np.frombuffer(oracle.forge(bytes(payload)), np.uint8).copy())
    decoded = scheme.decode(forged)
    assert decoded[0] == -LARGEST and decoded[1] == 0 and decoded[16] == -1 and decoded[2] == 1
