"""Encode 1-bit SGD in plain torch: the oracle for the fast kernels. reference/bucket.py decodes."""

from __future__ import annotations

import torch

from hvd_adaptive.kernels.constants import NORM_LANES
from hvd_adaptive.kernels.packing import ONE_BIT
from hvd_adaptive.kernels.reference.pack import pack_codes


def encode(flat: torch.Tensor, means: torch.Tensor, words: torch.Tensor, bucket_size: int) -> None:
    """Give code 0 to coordinates of ``flat`` (float32, (n,)) below 0, code 1 to the others.

    Fill ``means`` (float32, (buckets, 2): mean of each side, 0 for a side without coordinates, NaN
    for both in a bucket with NaN or Inf) and ``words`` (int32, the packed codes). Sums are float64,
    in the fixed tree of 32 lanes, and cannot overflow.
    """
    count = -(-flat.numel() // bucket_size)
    width = -(-bucket_size // NORM_LANES) * NORM_LANES
    padded = flat.new_zeros(count * bucket_size)
    padded[: flat.numel()] = flat
    lanes = flat.new_zeros(count, width, dtype=torch.float64)
    lanes[:, :bucket_size] = padded.view(count, bucket_size)
    below = lanes < 0
    zero = torch.zeros_like(lanes)
    sums = [add_lanes(torch.where(below, lanes, zero)), add_lanes(torch.where(below, zero, lanes))]
    sizes = torch.full_like(sums[0], bucket_size)
    sizes[-1:] = flat.numel() - (count - 1) * bucket_size
    negative = below.sum(dim=1)
    sides = torch.stack(sums, dim=1) / torch.stack([negative, sizes - negative], 1).clamp(min=1)
    finite = torch.isfinite(sums[0] + sums[1]).unsqueeze(1)
    means.copy_(torch.where(finite, sides, torch.nan))
    words.copy_(pack_codes((~(flat < 0)).to(torch.int64), ONE_BIT))


def add_lanes(values: torch.Tensor) -> torch.Tensor:
    """Sum the rows: lane l adds values l, l + 32, ... in order, then a tree adds the lanes."""
    total = values.new_zeros(values.shape[0], NORM_LANES)
    for begin in range(0, values.shape[1], NORM_LANES):
        total = total + values[:, begin : begin + NORM_LANES]
    half = NORM_LANES // 2
    while half:
        total = total[:, :half] + total[:, half : 2 * half]
        half //= 2
    return total[:, 0]
