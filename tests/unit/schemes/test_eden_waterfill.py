"""EDEN with widths of buckets: error, rate, unbiasedness, zeros, NaN, damaged bodies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hvd_adaptive import EDEN, PayloadError
from hvd_adaptive.kernels.eden import widths_of, with_widths
from hvd_adaptive.kernels.random import stream_key

SIGMAS = 5


def codec_of(bits: float, size: int = 64, **keywords):
    return EDEN(bits=bits, allocation="waterfill", bucket_size=size, **keywords).codec


def uneven(count: int, size: int, seed: int = 0) -> torch.Tensor:
    """Normal buckets whose root mean squares are 1, 1/2, 1/4, ... 1/128, in turns."""
    flat = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return flat * 2.0 ** -(torch.arange(count) // size % 8).float()


def energy(flat: torch.Tensor) -> torch.Tensor:
    return flat.double().square().sum()


@pytest.mark.parametrize("bits", (0.25, 0.5, 1, 1.5, 2, 3, 6, 8))
def test_the_rate_is_met(bits):
    """Bodies take the bits asked for, on average and but for one bucket."""
    x, codec = uneven(256 * 64, 64), codec_of(bits)
    sizes = [codec._body(x, key).numel() - codec.least_body_bytes(x.numel()) for key in range(8)]
    most = codec.body_bytes(x.numel()) - codec.least_body_bytes(x.numel())
    assert max(sizes) <= most
    # A section's last block is filled up to 16 words.
    assert np.mean(sizes) * 8 / x.numel() == pytest.approx(bits, abs=0.12)


@pytest.mark.parametrize("bits", (1, 2, 3))
def test_the_error_is_less_than_with_equal_bits(bits):
    """Bounded by reverse water-filling of Gaussian buckets, whose error at b bits is 4**-b."""
    x = uneven(64 * 512, 512)
    own, equal = codec_of(bits, 512), EDEN(bits=bits, bucket_size=512).codec
    errors = [
        float(sum(energy(c.roundtrip(x, key) - x) for key in range(8)) / 8 / energy(x))
        for c in (own, equal)
    ]
    variances = 4.0 ** -np.arange(8)
    level = min(
        np.geomspace(1e-9, 1, 4000),
        key=lambda w: abs(np.maximum(np.log2(variances / w) / 2, 0).mean() - bits),
    )
    bound = np.minimum(variances, level).sum() / variances.sum()
    assert bound < errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("bits", (0.3, 1.5, 4))
def test_unbiased(bits):
    """The mean error of each bucket, along it and along some coordinates, within 5 sigma."""
    x, codec, count = uneven(8 * 64, 64, seed=3), codec_of(bits), 1000
    x[64:128] = 0.0
    x[64] = 0.4  # one-hot
    error = torch.stack(
        [codec.roundtrip(x, stream_key(0, 0, k)) - x for k in range(count)]
    ).double()
    along = (error.view(count, 8, 64) * x.view(8, 64)).sum(dim=2)
    looked_at = torch.cat([along, error[:, ::37]], dim=1)
    mean, deviation = looked_at.mean(dim=0), looked_at.std(dim=0)
    rounding = 1e-5 * x.abs().max()
    assert (mean.abs() <= SIGMAS * deviation / math.sqrt(count) + rounding).all()
    # S keeps a bucket's projection on itself, so that only sampling moves it.
    assert bits < 4 or (along.abs() <= 1e-4 * energy(x)).all()


def test_errors_of_ranks_average_out():
    x, codec, ranks = uneven(64 * 64, 64), codec_of(2), 32
    keys = [stream_key(0, rank) for rank in range(ranks)]
    out = torch.empty_like(x)
    codec.decode_bodies([codec._body(x, k) for k in keys], keys, 1 / ranks, out, add=False)
    alone = sum(energy(codec.roundtrip(x, k) - x) for k in keys) / ranks
    assert float(energy(out - x) / alone) == pytest.approx(1 / ranks, rel=0.15)


@pytest.mark.parametrize("count", (0, 1, 63, 64, 65, 700, 1000))
@pytest.mark.parametrize("size", (64, 512))
def test_partial_buckets(count, size):
    x, codec = uneven(count, size), codec_of(6, size)
    assert energy(codec.roundtrip(x, 3) - x) <= 0.01 * energy(x)


def test_zeros_and_nan():
    x, codec = uneven(512, 64), codec_of(2)
    x[64:128], x[200], x[300] = 0.0, torch.nan, torch.inf
    out = codec.roundtrip(x, 1)
    assert not out[64:128].any()
    assert out[192:320].isnan().all()
    rest = torch.cat([out[:64], out[128:192], out[320:]])
    assert rest.isfinite().all() and rest.any()
    nothing = codec._body(torch.zeros(512), 1)
    assert nothing.numel() == codec.least_body_bytes(512)
    assert not codec.roundtrip(torch.zeros(512), 1).any()


@pytest.mark.parametrize("power", (-140, -119, -60, 60, 115))
def test_tiny_and_huge_buckets(power):
    x, codec = uneven(512, 64) * 0.2, codec_of(4)
    x = x * 2.0**power
    out = codec.roundtrip(x, 1)
    assert not out.isnan().any()
    if power == -140:
        assert not out.any()
    elif power > -119:
        assert energy(out - x) <= 0.01 * energy(x)


def test_widths_in_scales():
    scales = (torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5).numpy()
    for bits in range(1, 9):
        marked = with_widths(scales, bits)
        assert (widths_of(marked) == bits).all()
        assert (np.abs(marked.astype(float) / scales - 1) <= 4 * 2.0**-23).all()
    assert widths_of(np.array([0, -0.0, np.nan, np.inf], np.float32)).tolist() == [0] * 4


def test_damaged_bodies_are_refused():
    x, codec = uneven(4096, 512), codec_of(2, 512)
    body = codec._body(x, 1)
    out = torch.empty(4096)
    for damaged in (body[:-8], torch.cat([body, body.new_zeros(8)])):
        with pytest.raises(PayloadError, match="bytes"):
            codec.decode_bodies([damaged], [1], 1.0, out, add=False)
    other = body.clone()
    other[8:40].view(torch.float32)[0] = 0.0
    with pytest.raises(PayloadError, match="bytes"):
        codec.decode_bodies([other], [1], 1.0, out, add=False)
    other = body.clone()
    other[8:40].view(torch.int32)[0] |= 7  # eight bits: never sent at two on average
    with pytest.raises(PayloadError, match="8 bits, more than 4"):
        codec.decode_bodies([other], [1], 1.0, out, add=False)


@pytest.mark.parametrize("bits", (0.2, 8.1, "2", True))
def test_wrong_bits(bits):
    with pytest.raises(ValueError, match="bits"):
        EDEN(bits=bits, allocation="waterfill")


def test_wrong_allocation():
    with pytest.raises(ValueError, match="allocation='even'"):
        EDEN(allocation="even")
    with pytest.raises(ValueError, match=r"bits=1\.5"):
        EDEN(bits=1.5)
