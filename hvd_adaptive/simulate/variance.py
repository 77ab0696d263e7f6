"""Measure the error of quantised gradients, and the scatter of the gradients themselves.

"Average variance" in the ALQ paper's Figs 4 and 5 is that of the whole estimator: ranks' minibatch
gradients scatter around the true gradient, quantisation adds to this variance, and the sum is
divided by the number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.tensors import wide_of
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.codec.table_codec import TableCodec
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.kernels.random import Use, stream_key

# Draws of a Monte Carlo mean.
DRAWS = 16


@dataclass(frozen=True)
class QuantizationError:
    """Error of quantising one vector v, over random rounding alone, summed over its coordinates.

    Attributes:
        variance: E||Q(v) - E Q(v)||**2 (ALQ Eq. 1).
        normalized: Sum over buckets of the same divided by the bucket's squared norm (Eq. 3); NaN
            for schemes without a level table.
        bias: E Q(v) - v of a scheme that clips, float64 in the shape of v; None if there is none.
    """

    variance: float
    normalized: float
    bias: torch.Tensor | None = None


def quantization_error(scheme: GradientCompressor | Codec, flat: torch.Tensor) -> QuantizationError:
    """Return the exact error (ALQ Eq. 1) if ``scheme`` has a level table, else an estimate.

    The estimate is the mean square of ``DRAWS`` draws; a bias then counts as variance.

    Args:
        scheme: A scheme, or a codec of one.
        flat: 1-D, any floating dtype. Zero buckets contribute nothing; a non-finite bucket makes
            all results NaN.
    """
    flat = flat.detach().resolve_neg().to(torch.float32)
    if not flat.numel():
        return QuantizationError(0.0, 0.0)
    codec = scheme.parts.default if isinstance(scheme, GradientCompressor) else scheme
    if not isinstance(codec, TableCodec):
        keys = [stream_key(0, 0, draw, Use.DRAW) for draw in range(DRAWS)]
        errors = (codec.payloads.roundtrip(flat, key) - flat for key in keys)
        squares = sum(float(error.double().square().sum()) for error in errors)
        return QuantizationError(squares / DRAWS, float("nan"))
    if codec.payloads.zeros_of(flat) is not None:  # buckets are cut from the other coordinates
        there = flat != 0
        found = quantization_error(codec, flat[there])
        if found.bias is None:
            return found
        bias = torch.zeros_like(flat, dtype=torch.float64)
        bias[there] = found.bias
        return dataclasses.replace(found, bias=bias)
    ops, bucket = kernels.for_device(flat.device), min(codec.settings.bucket_size, flat.numel())
    clipped, lost = flat, None
    if codec.settings.clip is not None:
        clipped = ops.clipped(flat, bucket, codec.settings.clip)
        lost = clipped.double() - flat.double()
    # NaN for a non-finite bucket.
    of_buckets = ops.errors(clipped, bucket, codec.norm, codec.table.kernel)[:, 0]
    norms = ops.bucket_norms(clipped, bucket, codec.norm).double()
    normalized = torch.where(norms == 0, 0.0, of_buckets / norms.square())
    return QuantizationError(float(of_buckets.sum()), float(normalized.sum()), lost)


@dataclass(frozen=True)
class Scatter:
    """Variance of M ranks' minibatch gradients at one point, per coordinate.

    Both are unbiased (M - 1 in the denominator), and NaN for one rank.

    Attributes:
        variance: Trace of the covariance of one rank's gradient / coordinates: SGD's variance.
        normalized: The same after each bucket is divided by its L2 norm (the ALQ paper's Fig. 1).
    """

    variance: float
    normalized: float


def scatter(flats: Sequence[torch.Tensor], bucket_size: int) -> Scatter:
    """Return the scatter of groups of gradients.

    Args:
        flats: (M, coordinates) for each group.
        bucket_size: Coordinates of a bucket.
    """
    coordinates = sum(flat.shape[1] for flat in flats)
    if flats[0].shape[0] < 2:
        return Scatter(float("nan"), float("nan"))
    plain = normalized = 0.0
    for flat in flats:
        flat = flat.to(wide_of(flat.dtype))
        plain += float(flat.var(dim=0).sum(dtype=torch.float64))
        for bucket in flat.split(bucket_size, dim=1):
            unit = torch.nn.functional.normalize(bucket, dim=1, eps=torch.finfo(bucket.dtype).tiny)
            normalized += float(unit.var(dim=0).sum(dtype=torch.float64))
    return Scatter(plain / coordinates, normalized / coordinates)
