"""Compute the exact variance that rounding to a level table adds: the oracle for any device.

numba/variance.py has the same function for CPU tensors, with the same operations in the same order:
ranks choose bits by these sums (codec/second_stage.py), and must choose alike.
"""

from __future__ import annotations

import functools

import torch

from hvd_adaptive.base.device import from_host
from hvd_adaptive.kernels.tables import KernelTable, interval_ends


def variances(
    flat: torch.Tensor, norms: torch.Tensor, bucket_size: int, table: KernelTable
) -> torch.Tensor:
    """Return the variance of each bucket of ``flat`` (float32, (n,)): float64 (buckets,).

    A bucket's variance is the sum over its coordinates of (u - r)(r - l), the variance of rounding
    r = abs(v)/norm to its neighbours l <= r <= u without bias (ALQ paper, Eqs 1, 2), in units of
    the squared norm. It is 0 if the norm is 0, NaN if the norm is NaN. The function does not wait
    for the result. norms: float32 (buckets,).
    """
    ends = _ends(table, flat.device)
    padded = flat.new_zeros(len(norms) * bucket_size)
    padded[: flat.numel()] = flat
    inverse = 1 / norms.to(torch.float64)[:, None]
    r = (padded.view(len(norms), bucket_size).abs() * inverse).clamp(max=1)
    r = r.to(torch.float32).to(torch.float64)
    index = torch.bucketize(r, ends[1:-1])
    variance = (ends[index + 1] - r) * (r - ends[index])
    # The last bucket may be shorter than its padded length.
    places = torch.arange(padded.numel(), device=flat.device).view(r.shape)
    variance = torch.where(places < flat.numel(), variance, 0.0)
    # On the host a cumulative sum adds one term after the other. On a GPU it is not deterministic.
    total = variance.cumsum(dim=1)[:, -1] if flat.device.type == "cpu" else variance.sum(dim=1)
    return torch.where(norms == 0, 0.0, total)


@functools.lru_cache(maxsize=64)
def _ends(table: KernelTable, device: torch.device) -> torch.Tensor:
    return from_host(torch.from_numpy(interval_ends(table)).to(torch.float64), device)
