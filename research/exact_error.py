"""E||Q(g) - g||² / ||g||² where there is a formula for it: no random draw."""

from __future__ import annotations

import torch

from hvd_adaptive import ORQ, LinearQuantile
from hvd_adaptive.compressor import GradientCompressor
from hvd_adaptive.simulate.variance import quantization_error


def exact_error(scheme: GradientCompressor, flat: torch.Tensor) -> float | None:
    """Variance and squared bias of a scheme that rounds at random to levels; None for others."""
    if hasattr(scheme.parts.default, "table"):
        error = quantization_error(scheme, flat)
        bias = 0.0 if error.bias is None else float(error.bias.square().sum())
        return (error.variance + bias) / float(flat.double().square().sum())
    if isinstance(scheme, ORQ | LinearQuantile) and scheme.settings.clip is None:
        return rounding_error(scheme, flat)
    return None


def rounding_error(scheme: ORQ | LinearQuantile, flat: torch.Tensor) -> float:
    """Of random rounding to levels of each bucket's own: ORQ paper, Eq. 9."""
    bucket, total = scheme.settings.bucket_size, 0.0
    for levels, part in zip(
        scheme.parts.default.solve(flat, bucket), flat.split(bucket), strict=True
    ):
        levels, v = levels.double(), part.double()
        above = torch.searchsorted(levels, v).clamp(1, levels.numel() - 1)
        total += float(((v - levels[above - 1]) * (levels[above] - v)).sum())
    return total / float(flat.double().square().sum())
