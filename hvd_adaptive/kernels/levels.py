"""Define what the solvers of buckets' levels share: their limits, sorted buckets, quantiles."""

from __future__ import annotations

import torch

# symmetric_levels: 2 |slope| width <= TOLERANCE * spread bounds the loss by that share of the
# objective; a spread of NEGLIGIBLE * squares is rounding.
TOLERANCE, NEGLIGIBLE = 0.01, 1e-12
# Slopes of symmetric_level's first bracket over sum |v|: their signs are certain, and a Gaussian's
# sizes make the first step.
START_LOW, START_HIGH = -0.42, 0.27
MOST_PASSES = 64


def sorted_rows(flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
    """Sort each bucket in ascending order, without negative zeros; infinities fill the last one."""
    rows = flat.new_full((-(-flat.numel() // bucket_size), bucket_size), float("inf"))
    rows.view(-1)[: flat.numel()] = flat + 0.0
    return torch.sort(rows, dim=1).values


def quantiles(
    flat: torch.Tensor, norms: torch.Tensor, bucket_size: int, levels: int
) -> torch.Tensor:
    """Return the quantiles of buckets that have a norm above 0, and the norms of the others."""
    rows, norms = sorted_rows(flat, bucket_size), norms.unsqueeze(1)
    buckets = torch.arange(len(rows), device=flat.device).unsqueeze(1)
    ends = (flat.numel() - buckets * bucket_size).clamp(max=bucket_size) - 1
    products = ends * torch.arange(levels, device=flat.device)
    place, rest = products // (levels - 1), products % (levels - 1)
    below = rows.gather(1, place).to(torch.float64)
    above = rows.gather(1, torch.minimum(place + 1, ends)).to(torch.float64)
    # For a division by a number torch would multiply with its inverse on a GPU, which rounds twice.
    last = torch.full((), levels - 1, dtype=torch.float64, device=flat.device)
    found = below + (above - below) * (rest.to(torch.float64) / last)
    return torch.where(norms > 0, found.to(torch.float32), norms)
