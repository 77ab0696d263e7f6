"""Sum buckets in the fixed tree of 32 lanes, and give a bucket's number to its coordinates."""

from __future__ import annotations

import torch

from hvd_adaptive.kernels.constants import NORM_LANES


def rows_of(flat: torch.Tensor, bucket_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the buckets as rows of ``dtype``, filled with zeros to a multiple of 32 columns."""
    count = -(-flat.numel() // bucket_size)
    padded = flat.new_zeros(count * bucket_size)
    padded[: flat.numel()] = flat
    rows = flat.new_zeros(count, -(-bucket_size // NORM_LANES) * NORM_LANES, dtype=dtype)
    rows[:, :bucket_size] = padded.view(count, bucket_size)
    return rows


def add_lanes(rows: torch.Tensor) -> torch.Tensor:
    """Sum each row: lane l adds numbers l, l + 32, ... in order, then a tree adds the lanes."""
    lanes = rows.new_zeros(len(rows), NORM_LANES)
    for part in rows.split(NORM_LANES, dim=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def per_coordinate(values: torch.Tensor, coordinates: int, bucket_size: int) -> torch.Tensor:
    """Return the value of each coordinate's bucket."""
    return values.repeat_interleave(bucket_size)[:coordinates]
