"""Measure the errors of quantised coordinates, by bucket."""

from __future__ import annotations

import torch


def squares_of(flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
    """Return each bucket's squared L2 norm, float64 (buckets,)."""
    return torch.stack([part.dot(part) for part in flat.to(torch.float64).split(bucket_size)])


def rounding_errors(flat: torch.Tensor, dtype: torch.dtype, bucket_size: int) -> torch.Tensor:
    """Return ``Payloads.squared_errors`` of float32 numbers that are sent as ``dtype``."""
    error = flat.to(dtype).to(flat.dtype) - flat
    return torch.stack([squares_of(values, bucket_size) for values in (error, flat)], dim=1)
