"""QCS as a compressor: choice of k and Q, zeros, hostile payloads, wrong keywords."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import unit_oracles as oracle

from hvd_adaptive import QCS, QSGD, PayloadError

SMALL = {"bucket_size": 64, "measurements": 40, "quantizer_range": 2}


def gradient(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n).astype(np.float32))


def from_bytes(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


@pytest.mark.parametrize("order", (16, 64, 96, 100, 256, 384))
def test_gain_takes_the_least_gamma_of_all_pairs(order):
    k, q = np.meshgrid(np.arange(1, order + 1), [0.5, *range(1, 128)], indexing="ij")
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.where(k == 1, 1 / 12, np.log(k) / (4 * (k - 1)))
    gamma = order / k - 1 + order / q**2 * largest
    gains = 32 * order / (k * np.log2(2 * q + 1) + 32)
    for gain in (4, 4.5, 7, 8, 10, 13.5, 15, 21, 32, 50, 80, 32 * order / 33):
        if not 4 <= gain <= 32 * order / 33:
            continue
        best = np.where(gains >= gain * (1 - 1e-12), gamma, np.inf)
        scheme = QCS(bucket_size=order, gain=gain)
        assert scheme.parts.default.gamma == pytest.approx(best.min(), rel=1e-12)
        at = (
            scheme.parts.default.measurements - 1,
            [0.5, *range(1, 128)].index(scheme.parts.default.quantizer_range),
        )
        assert best[at] == pytest.approx(best.min(), rel=1e-12)
        assert (
            scheme.parts.default.compression_gain == pytest.approx(gains[at])
            and gains[at] >= gain - 1e-9
        )


@pytest.mark.parametrize("gain", (4, 10, 21, 100, 1000, 32 * 8192 / 33))
def test_the_wire_has_the_promised_gain(gain):
    """Within the packing's 3.5 %, or 16 words at a time, header left out."""
    scheme = QCS(gain=gain)
    n = 8192 * 500
    assert 32 * n / (8 * scheme.parts.default.body_bytes(n)) == pytest.approx(
        scheme.parts.default.compression_gain, rel=0.035
    )
    assert scheme.parts.default.compression_gain >= gain * (1 - 1e-12)


def test_gains_of_large_partitions():
    for order in (2048, 2**16, 2**20):
        scheme = QCS(bucket_size=order, gain=1000)
        assert (
            1000 <= scheme.parts.default.compression_gain < 1050
            and 1 <= scheme.parts.default.measurements < order / 30
        )
    assert QCS().parts.default.compression_gain == pytest.approx(10, rel=0.02)


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
        payload = scheme.encode(gradient(coordinates))
        assert payload.numel() == 96 + -(-body // 8) * 8
        assert scheme.decode(payload).numel() == coordinates


def test_zero_projections():
    """k = 1 of n = 2: the signs make g_0 ± g_1, which is 0 for about half of the buckets."""
    scheme = QCS(bucket_size=2, measurements=1, quantizer_range=1)
    decoded = scheme.decode(scheme.encode(torch.ones(2000), seed=1)).view(-1, 2)
    zero = (decoded == 0).all(dim=1)
    assert 400 < zero.sum() < 600 and decoded[~zero].all()


def test_payloads_of_other_settings_are_refused():
    payload = QCS(**SMALL).encode(gradient(300))
    for change in ({"estimator": "mmse"}, {"measurements": 41}):
        with pytest.raises(PayloadError, match="other settings"):
            QCS(**SMALL | change).decode(payload)
    with pytest.raises(PayloadError, match="alphabet 5"):
        QCS(**SMALL | {"quantizer_range": 3}).decode(payload)
    with pytest.raises(PayloadError, match="bucket size 64"):
        QCS(**SMALL | {"bucket_size": 96}).decode(payload)
    with pytest.raises(PayloadError, match="scheme qcs"):
        QSGD().decode(payload)


def test_hostile_scales_and_codes_do_not_crash():
    scheme = QCS(bucket_size=64, measurements=40, quantizer_range=127)
    payload = scheme.encode(gradient(150), seed=0).numpy().tobytes()
    for value, at in itertools.product((np.nan, np.inf, -1.0, 1e38), range(3)):
        data = bytearray(payload)
        data[96 + 4 * at : 100 + 4 * at] = np.float32(value).tobytes()
        data[108:] = b"\xff" * len(data[108:])
        assert scheme.decode(from_bytes(oracle.forge(bytes(data)))).numel() == 150
    for cut in (1, 4, 8, 64):
        with pytest.raises(PayloadError):
            scheme.decode(from_bytes(oracle.forge(payload[:-cut], length=len(payload) - cut)))


def test_settings_are_told():
    scheme = QCS(bucket_size=100, measurements=50, quantizer_range=2.0, estimator="mmse")
    assert (
        scheme.parts.default.measurements,
        scheme.parts.default.quantizer_range,
        scheme.parts.default.alphabet,
    ) == (
        50,
        2,
        5,
    )
    assert scheme.parts.default.gamma == pytest.approx(1 + 100 / 16 * math.log(50) / 49)
    assert scheme.parts.default.compression_gain == pytest.approx(3200 / (50 * math.log2(5) + 32))
    assert "measurements=50, quantizer_range=2" in repr(scheme)
    assert QCS(bucket_size=100, quantizer_range=1).parts.default.measurements == 100
    assert (
        scheme.parts.default.settings_fingerprint
        != QCS(
            bucket_size=100, measurements=50, quantizer_range=2
        ).parts.default.settings_fingerprint
    )


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"estimator": "biased"}, "estimator='biased': must be one of 'unbiased', 'mmse'"),
        ({"gain": 3.9}, "gain=3.9: must be a number from 4 to 7943.76"),
        ({"gain": 7944}, "gain=7944"),
        ({"gain": float("nan")}, "gain=nan"),
        ({"gain": "21"}, "gain='21'"),
        ({"gain": True}, "gain=True"),
        ({"gain": 4, "bucket_size": 2}, "gain=4: must be a number"),
        ({"gain": 21, "measurements": 5}, "gain=21: cannot be given together"),
        ({"gain": 21, "quantizer_range": 1}, "gain=21: cannot be given together"),
        ({"measurements": 0, "quantizer_range": 1}, "measurements=0: must be an integer from 1 to"),
        ({"measurements": 8193, "quantizer_range": 1}, "measurements=8193"),
        ({"measurements": 2.5, "quantizer_range": 1}, "measurements=2.5"),
        ({"measurements": 100}, "quantizer_range=None: must be 0.5 or an integer from 1 to 127"),
        ({"quantizer_range": 0}, "quantizer_range=0"),
        ({"quantizer_range": 1.5}, "quantizer_range=1.5"),
        ({"quantizer_range": 128}, "quantizer_range=128"),
        ({"quantizer_range": True}, "quantizer_range=True"),
        ({"quantizer_range": "1"}, "quantizer_range='1'"),
        ({"bucket_size": 97}, "bucket_size=97: must be a power of two .*96, 100, 192, 200, 288"),
        ({"bucket_size": 2**25}, "bucket_size=33554432"),
        ({"parameter_bits": {"*": 4}}, "parameter_bits="),
    ],
)
def test_wrong_keywords(keywords, message):
    with pytest.raises(ValueError, match=message):
        QCS(**keywords)
