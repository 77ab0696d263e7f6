"""Encode 1-bit SGD in plain torch: the oracle for the fast kernels. reference/bucket.py decodes."""

from __future__ import annotations

import torch

from hvd_adaptive.kernels.packing import ONE_BIT
from hvd_adaptive.kernels.reference.codes import pack_codes
from hvd_adaptive.kernels.reference.tables import add_lanes, rows_of


def encode(flat: torch.Tensor, means: torch.Tensor, words: torch.Tensor, bucket_size: int) -> None:
    """Give code 0 to coordinates of ``flat`` (float32, (n,)) below 0, code 1 to the others.

    Fill ``means`` (float32, (buckets, 2): mean of each side, 0 for a side without coordinates, NaN
    for both in a bucket with NaN or Inf) and ``words`` (int32, the packed codes). Sums are float64,
    in the fixed tree of 32 lanes, and cannot overflow.
    """
    lanes = rows_of(flat, bucket_size, torch.float64)
    below = lanes < 0
    zero = torch.zeros_like(lanes)
    sums = [add_lanes(torch.where(below, lanes, zero)), add_lanes(torch.where(below, zero, lanes))]
    sizes = torch.full_like(sums[0], bucket_size)
    sizes[-1:] = flat.numel() - (len(lanes) - 1) * bucket_size
    negative = below.sum(dim=1)
    sides = torch.stack(sums, dim=1) / torch.stack([negative, sizes - negative], 1).clamp(min=1)
    finite = torch.isfinite(sums[0] + sums[1]).unsqueeze(1)
    means.copy_(torch.where(finite, sides, torch.nan))
    words.copy_(pack_codes((~(flat < 0)).to(torch.int64), ONE_BIT))
