"""QCS as a compressor: choice of k and Q, lengths, zeros."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import unit_oracles as oracle
from kernel_cases import ordinary, vector

from hvd_adaptive import QCS


@pytest.mark.parametrize("order", (16, 64, 96, 100, 256, 384))
def test_gain_takes_the_least_gamma_of_all_pairs(order):
    ranges = [0.5, *range(1, 128)]
    k, q = np.meshgrid(np.arange(1, order + 1), ranges, indexing="ij")
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.where(k == 1, 1 / 12, np.log(k) / (4 * (k - 1)))
    gamma = order / k - 1 + order / q**2 * largest
    gains = 32 * order / (k * np.log2(2 * q + 1) + 32)
    for gain in (4, 4.5, 7, 8, 10, 13.5, 15, 21, 32, 50, 80, 32 * order / 33):
        if not 4 <= gain <= 32 * order / 33:
            continue
        best = np.where(gains >= gain * (1 - 1e-12), gamma, np.inf)
        codec = QCS(bucket_size=order, gain=gain).parts.default
        at = codec.measurements - 1, ranges.index(codec.quantizer_range)
        assert codec.gamma == pytest.approx(best.min(), rel=1e-12)
        assert best[at] == pytest.approx(best.min(), rel=1e-12)
        assert codec.compression_gain == pytest.approx(gains[at]) and gains[at] >= gain - 1e-9


@pytest.mark.parametrize("order", (2048, 8192, 2**16, 2**20))
@pytest.mark.parametrize("gain", (4, 10, 21, 100, 1000, 32 * 2048 / 33))
def test_the_wire_has_the_promised_gain(gain, order):
    """Within the packing's 3.5 %, or 16 words at a time, header left out."""
    codec, n = QCS(gain=gain, bucket_size=order).parts.default, order * 500
    assert gain * (1 - 1e-12) <= codec.compression_gain < 1.05 * gain
    on_the_wire = 32 * n / (8 * codec.body_bytes(n))
    assert on_the_wire == pytest.approx(codec.compression_gain, rel=0.035)


@pytest.mark.parametrize(("n", "k", "q"), [(96, 96, 0.5), (256, 3, 127), (8, 1, 1)])
def test_lengths(n, k, q):
    """Partial buckets are filled up to the next of the allowed orders."""
    orders = sorted([96, 100, 192, 200, 288, 320, 384, *(1 << p for p in range(15))])
    scheme = QCS(bucket_size=n, measurements=k, quantizer_range=q)
    for coordinates in (0, 1, 2, n - 1, n, n + 1, n + n // 2 + 1, 11 * n - 3):
        count, rest = divmod(coordinates, n)
        filled = min(order for order in orders if order >= rest) if rest else 0
        codes = count * k + -(-k * filled // n)
        body = 4 * (count + bool(rest) + oracle.word_count(codes, int(2 * q + 1)))
        payload = scheme.encode(vector(ordinary, coordinates))
        assert payload.numel() == 96 + -(-body // 8) * 8
        assert scheme.decode(payload).numel() == coordinates


def test_zero_projections():
    """k = 1 of n = 2: the signs make g_0 ± g_1, which is 0 for about half of the buckets."""
    scheme = QCS(bucket_size=2, measurements=1, quantizer_range=1)
    decoded = scheme.decode(scheme.encode(torch.ones(2000), seed=1)).view(-1, 2)
    zero = (decoded == 0).all(dim=1)
    assert 400 < zero.sum() < 600 and decoded[~zero].all()


def test_settings_are_told():
    scheme = QCS(bucket_size=100, measurements=50, quantizer_range=2.0, estimator="mmse")
    codec = scheme.parts.default
    assert (codec.measurements, codec.quantizer_range, codec.alphabet) == (50, 2, 5)
    assert codec.gamma == pytest.approx(1 + 100 / 16 * math.log(50) / 49)
    assert codec.compression_gain == pytest.approx(3200 / (50 * math.log2(5) + 32))
    assert "measurements=50, quantizer_range=2" in repr(scheme)
    assert QCS().parts.default.compression_gain == pytest.approx(10, rel=0.02)
    assert QCS(bucket_size=100, quantizer_range=1).parts.default.measurements == 100
