"""What compression gains cost, all bits counted, and who reaches a gain with which settings."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hvd_adaptive import QCS, QSGD, SparseSGD
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels.random import Use, stream_key
from hvd_adaptive.schemes.qcs import variance_bound

SCALE_BITS = 32
HEADER_BYTES = 96
MEASURE_STREAM = Use.MEASURE


def qsgd_gain(bucket: int, intervals: int) -> float:
    """32 bits over those of QSGD with fixed-length codes of log2(2s + 1) bits and a scale."""
    return 32 * bucket / (bucket * math.log2(2 * intervals + 1) + SCALE_BITS)


def ternary_entropy(bucket: int) -> float:
    """Bits a symbol of L2 QSGD with s = 1 on Gaussian buckets: of an ideal entropy code.

    A coordinate is ±1 with probability E|v_i|/‖v‖ = Γ(d/2) / (√π Γ((d + 1)/2)), the mean first
    coordinate's magnitude on the unit sphere, each sign as often.
    """
    p = math.exp(math.lgamma(bucket / 2) - math.lgamma((bucket + 1) / 2)) / math.sqrt(math.pi)
    if p >= 1:
        return 1.0
    return p - p * math.log2(p) - (1 - p) * math.log2(1 - p)


def ternary_gain(bucket: int) -> float:
    """Gain of L2 QSGD with s = 1 and an ideal entropy code, on Gaussian buckets."""
    return 32 * bucket / (bucket * ternary_entropy(bucket) + SCALE_BITS)


def ternary_bucket(gain: float, whole: int) -> int:
    """Smallest divisor of ``whole``, so least variance, at which ternary_gain reaches ``gain``."""
    sizes = [size for size in range(2, whole + 1) if whole % size == 0]
    return next(size for size in sizes if ternary_gain(size) >= gain)


def printed_gain(order: int, measurements: int, quantizer_range: float) -> float:
    """The QCS paper's own account, Eq. 11: the scale's 32 bits are left out."""
    return 32 * order / (measurements * math.log2(2 * quantizer_range + 1))


def best_printed(order: int, gain: float) -> tuple[int, float]:
    """(k, Q) of least γ whose gain by Eq. 11 is at least ``gain``."""
    pairs = [
        (k, q)
        for k in range(1, order + 1)
        for q in (0.5, *range(1, 128))
        if printed_gain(order, k, q) >= gain
    ]
    return min(pairs, key=lambda pair: variance_bound(order, *pair))


def body_gain(scheme: GradientCompressor, flat: torch.Tensor) -> float:
    """Of a real payload, its 96-byte header left out."""
    return 4 * flat.numel() / (scheme.encode(flat, seed=0).numel() - HEADER_BYTES)


def sparse_density(gain: float, bucket: int, coordinates: int = 64_000) -> float:
    """Largest density, to 1/1000, at which Gaussian payloads of SparseSGD reach ``gain``."""
    flat = torch.randn(coordinates, generator=torch.Generator().manual_seed(1))
    low, high = 1, 1000
    while high - low > 1:
        middle = (low + high) // 2
        enough = body_gain(SparseSGD(density=middle / 1000, bucket_size=bucket), flat) >= gain
        low, high = (middle, high) if enough else (low, middle)
    return low / 1000


def relative_error(scheme: GradientCompressor, flat: torch.Tensor, draws: int = 1) -> float:
    """Mean of ‖Q(g) - g‖²/‖g‖² over random draws of the codec."""
    exact, total = flat.double(), 0.0
    for draw in range(draws):
        key = stream_key(0, 0, draw, MEASURE_STREAM)
        total += float(
            (scheme.parts.default.payloads.roundtrip(flat, key).double() - exact).square().sum()
        )
    return total / draws / float(exact.square().sum())


# Of Fig. 2: settings at a gain, for partitions of n = 64 and where they are better off for one
# bucket of the whole gradient, 3,200 coordinates.
GAIN, FEWER, ORDER, WHOLE = 21, 35, 64, 3200
REGRESSION: dict[str, Callable[[], GradientCompressor | None]] = {
    "baseline": lambda: None,
    "QSGD": lambda: QSGD(intervals=1, bucket_size=ternary_bucket(GAIN, WHOLE)),
    "Sparse SGD": lambda: SparseSGD(density=sparse_density(GAIN, ORDER), bucket_size=ORDER),
    "QCS": lambda: QCS(gain=GAIN, bucket_size=ORDER, keep_zeros=False),
    # The largest order that divides the gradient.
    "QCS, n = 320": lambda: QCS(gain=GAIN, bucket_size=320, keep_zeros=False),
    "QCS, 40% fewer bits": lambda: QCS(gain=FEWER, bucket_size=ORDER, keep_zeros=False),
    "QSGD L∞, one bucket": lambda: QSGD(intervals=1, norm="linf", bucket_size=WHOLE),
    "Sparse SGD, one bucket": lambda: SparseSGD(
        density=sparse_density(GAIN, WHOLE), bucket_size=WHOLE
    ),
    # By the paper's own account of bits, in which a scale costs nothing.
    "QSGD, Eq. 11": lambda: QSGD(intervals=1, bucket_size=ORDER),
    "QCS, Eq. 11": lambda: _printed_qcs(GAIN),
}


def _printed_qcs(gain: float) -> QCS:
    measurements, quantizer_range = best_printed(ORDER, gain)
    return QCS(
        measurements=measurements,
        quantizer_range=quantizer_range,
        bucket_size=ORDER,
        keep_zeros=False,
    )


def told_gain(name: str, scheme: GradientCompressor | None) -> float:
    """Gain of a method of Fig. 2, all bits but the message's header counted; by Eq. 11 where its
    name says so."""
    if name.endswith("Eq. 11"):
        k, q = (
            (scheme.parts.default.measurements, scheme.parts.default.quantizer_range)
            if isinstance(scheme, QCS)
            else (ORDER, 1)
        )
        return printed_gain(ORDER, k, q)
    if scheme is None:
        return 1.0
    if isinstance(scheme, QCS):
        return scheme.parts.default.compression_gain
    if isinstance(scheme, SparseSGD):
        flat = torch.randn(64_000, generator=torch.Generator().manual_seed(1))
        return body_gain(scheme, flat)
    bucket = scheme.settings.bucket_size
    return ternary_gain(bucket) if name == "QSGD" else qsgd_gain(bucket, 1)
