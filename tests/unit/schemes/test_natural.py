"""Natural compression: each coordinate's power of two, by exact arithmetic; payloads."""

from __future__ import annotations

import struct

import numpy as np
import torch
import unit_oracles as oracle
import wire_decoder as wire
from kernel_cases import heavy, vector

from hvd_adaptive import NaturalCompression

from oracle.laws import Quantiser, law_of  # isort: skip

BUCKET = 500
LARGEST = float(np.finfo(np.float32).max)


def test_each_coordinate_is_rounded_as_its_random_integer_says():
    """C_nat in exact arithmetic: up where u/2**24 is below the distance from the lower power, so
    that it is unbiased, of variance value**2/8 at most (at 4/3 of a power)."""
    flat = vector(heavy, 20 * BUCKET + 77)
    flat[::9], flat[4], flat[7] = 0.0, 3e38, -1e-39
    ends = 2.0**-126 * 0.3, -(2.0**-126) * 0.7, 2.0**-126 * 1.4, 4 / 3, 2.0**127 * 1.25, -LARGEST
    flat[BUCKET : BUCKET + 120] = torch.tensor(ends).repeat(20)
    scheme = NaturalCompression(bucket_size=BUCKET)
    payload = scheme.encode(flat, seed=11)
    key = oracle.read_field(payload.numpy().tobytes(), "key")
    u = wire.all_integers(key, BUCKET, flat.numel())
    exact = flat.double().numpy()
    law = law_of(Quantiser("natural", BUCKET), exact)
    lower, upper = np.sort(np.abs([law.low, law.high]), axis=0)
    up = u * (upper - lower) < (np.abs(exact) - lower) * 2**24
    want = np.copysign(np.minimum(np.where(up, upper, lower), LARGEST), exact)
    np.testing.assert_array_equal(scheme.decode(payload).double().numpy(), want)


def test_powers_of_two_and_zeros_stay_as_they_are():
    powers = torch.from_numpy(2.0 ** np.arange(-126.0, 128.0)).to(torch.float32)
    flat = torch.cat([powers, -powers, torch.zeros(600), -torch.zeros(3)])
    scheme = NaturalCompression(bucket_size=BUCKET)
    decoded = scheme.decode(scheme.encode(flat, seed=0)).double().numpy()
    np.testing.assert_array_equal(decoded, flat.double().numpy())
    assert scheme.parts.default.body_bytes(512 * 1000) * 8 == 9 * 512 * 1000
    assert not np.signbit(decoded[-603:]).any()


def test_forged_codes_decode_to_nan_or_powers():
    scheme = NaturalCompression()
    payload = bytearray(scheme.encode(torch.ones(512), seed=0).numpy().tobytes())
    payload[96] = 255
    payload[97] = 0
    struct.pack_into("<I", payload, 96 + 512, 0xFFFFFFFF)
    decoded = scheme.decode(oracle.forged(bytes(payload)))
    assert decoded[0] == -LARGEST and decoded[1] == 0 and decoded[16] == -1 and decoded[2] == 1
