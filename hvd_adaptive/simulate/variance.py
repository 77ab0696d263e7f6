"""How far quantised gradients lie from the gradients, and these from their expectation.

"Average variance" in the ALQ paper's Figs 4 and 5 is that of the whole estimator: ranks' minibatch
gradients scatter about the true gradient, quantisation adds to it, and both are divided by the
number of ranks. All figures here are per coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_adaptive import kernels
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.streams import Use

# Of a Monte Carlo mean.
DRAWS = 16


@dataclass(frozen=True)
class QuantizationError:
    """Of one vector v, over random rounding alone; sums over its coordinates.

    variance: E||Q(v) - E Q(v)||**2 (ALQ Eq. 1).
    normalized: the sum over buckets of the same divided by the bucket's squared norm (Eq. 3); NaN
    for schemes without a level table.
    bias: E Q(v) - v of a scheme that clips, float64 like v; None where there is none.
    """

    variance: float
    normalized: float
    bias: torch.Tensor | None = None


def quantization_error(codec: Any, flat: torch.Tensor) -> QuantizationError:
    """Exact, from Eq. 1, where ``codec`` has a level table, else the mean square of ``DRAWS`` draws
    (a bias is then counted as variance).

    flat: 1-D, any floating dtype. Zero buckets count nothing; a non-finite one makes all NaN.
    """
    flat = flat.detach().resolve_neg().to(torch.float32)
    if not flat.numel():
        return QuantizationError(0.0, 0.0)
    if not hasattr(codec, "table"):
        keys = [stream_key(0, 0, draw, Use.DRAW) for draw in range(DRAWS)]
        squares = [(codec.roundtrip(flat, key) - flat).double().square().sum() for key in keys]
        return QuantizationError(float(sum(squares) / DRAWS), float("nan"))
    ops, bucket = kernels.for_device(flat.device), min(codec.settings.bucket_size, flat.numel())
    clipped, bias = flat, None
    if codec.settings.clip is not None:
        clipped = ops.clipped(flat, bucket, codec.settings.clip)
        bias = clipped.double() - flat.double()
    norms = ops.bucket_norms(clipped, bucket, codec.norm)
    # NaN where a bucket is not finite.
    of_buckets = kernels.for_device(flat.device, "variance").variances(
        clipped, norms, bucket, codec.table.kernel
    )
    variance = float((of_buckets * norms.double().square()).sum())
    return QuantizationError(variance, float(of_buckets.sum()), bias)


@dataclass(frozen=True)
class Scatter:
    """Of M ranks' minibatch gradients at one point, per coordinate.

    variance: trace of the covariance of one rank's gradient / coordinates: SGD's variance.
    normalized: the same after each bucket was divided by its L2 norm (the ALQ paper's Fig. 1).
    Both unbiased (M - 1 in the denominator), NaN for one rank.
    """

    variance: float
    normalized: float


def scatter(flats: Sequence[torch.Tensor], bucket_size: int) -> Scatter:
    """flats: for each group (M, coordinates)."""
    coordinates = sum(flat.shape[1] for flat in flats)
    if flats[0].shape[0] < 2:
        return Scatter(float("nan"), float("nan"))
    plain = normalized = 0.0
    for flat in flats:
        plain += float(flat.var(dim=0).sum(dtype=torch.float64))
        for bucket in flat.split(bucket_size, dim=1):
            unit = torch.nn.functional.normalize(bucket, dim=1, eps=torch.finfo(bucket.dtype).tiny)
            normalized += float(unit.var(dim=0).sum(dtype=torch.float64))
    return Scatter(plain / coordinates, normalized / coordinates)
