"""Compute bucket norms, clipping limits and histograms in Triton."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from hvd_adaptive.kernels.constants import BINS, COARSE_BINS
from hvd_adaptive.kernels.triton.lanes import bucket_sizes, clamped, norms_of
from hvd_adaptive.kernels.triton.launch import WARPS, kernel, launch
from hvd_adaptive.kernels.triton.places import for_each, own_place

_TILE = 1024


def bucket_norms(flat: torch.Tensor, bucket_size: int, norm: str) -> torch.Tensor:
    """See reference.tables.bucket_norms."""
    norms = flat.new_empty(-(-flat.numel() // bucket_size))
    fill_norms(flat, bucket_size, norm, None, norms)
    return norms


def fill_norms(
    flat: torch.Tensor,
    bucket_size: int,
    norm: str,
    limits: torch.Tensor | None,
    norms: torch.Tensor,
) -> None:
    """Fill ``norms`` (float32, (buckets,)) with reference.bucket_norms of ``flat``, within the
    buckets' limits of magnitude (float32) if there are any.
    """
    some, count = norms if limits is None else limits, norms.numel()
    args = flat, norms, some, flat.numel(), bucket_size, count
    constants = {"BUCKETS": WARPS, "LINF": norm == "linf", "CLIP": limits is not None}
    launch(_norms_kernel, -(-count // WARPS), flat, *args, **constants)


def clip_limits(flat: torch.Tensor, bucket_size: int, clip: float) -> torch.Tensor:
    """Return limits of the buckets' magnitudes, float32: see reference.tables.clipped."""
    limits = bucket_norms(flat, bucket_size, "l2")
    rest = flat.numel() - (limits.numel() - 1) * bucket_size
    for part, size in ((limits[:-1], bucket_size), (limits[-1:], rest)):
        part *= float(np.float32(clip / np.sqrt(np.float64(max(size, 1)))))
    return limits


def clipped(flat: torch.Tensor, bucket_size: int, clip: float) -> torch.Tensor:
    """See reference.tables.clipped."""
    limits, out, n = clip_limits(flat, bucket_size, clip), torch.empty_like(flat), flat.numel()
    for_each(_clip_kernel, flat, n, bucket_size, 0, flat, limits, out)
    return out


def histogram(bucket: torch.Tensor, scale: float) -> np.ndarray:
    """See reference.tables.histogram. The function waits for the device."""
    return counts(bucket, scale).cpu().numpy()


def counts(bucket: torch.Tensor, scale: float) -> torch.Tensor:
    """See reference.tables.counts."""
    n, found = bucket.numel(), bucket.new_zeros(BINS + 2, dtype=torch.int64)
    inverse = float(np.float32(1) / np.float32(scale))
    constants = {"TILE": _TILE, "BINS": BINS, "COARSE": COARSE_BINS}
    launch(_histogram_kernel, -(-n // _TILE), bucket, bucket, inverse, found, n, **constants)
    return found


@kernel
def _norms_kernel(
    x,
    norms,
    limits,
    n: tl.int64,
    bucket_size: tl.int64,
    buckets: tl.int64,
    BUCKETS: tl.constexpr,
    LINF: tl.constexpr,
    CLIP: tl.constexpr,
):
    """Compute the norms of a tile of buckets in each program."""
    b = tl.program_id(0).to(tl.int64) * BUCKETS + tl.arange(0, BUCKETS)[:, None]
    there = b < buckets
    size = bucket_sizes(b, n, bucket_size)
    limit = tl.load(limits + b, mask=there, other=0.0) if CLIP else 0.0
    norm = norms_of(x, b * bucket_size, size, tl.max(size), limit, BUCKETS, LINF, CLIP)
    tl.store(norms + b, norm, mask=there)


@kernel
def _clip_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    x,
    limits,
    out,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    i, there, bucket, _ = own_place(n, bucket_size, magic, TILE, BUCKETS)
    limit = tl.load(limits + bucket, mask=there, other=0.0)
    tl.store(out + i, clamped(tl.load(x + i, mask=there, other=0.0), limit), mask=there)


@kernel
def _histogram_kernel(
    x, inverse, counts, n: tl.int64, TILE: tl.constexpr, BINS: tl.constexpr, COARSE: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = i < n
    r = tl.abs(tl.load(x + i, mask=there, other=0.0)) * tl.cast(inverse, tl.float32)
    bits = r.to(tl.int32, bitcast=True)
    low = tl.maximum((bits >> 20) - ((127 - 28) << 3), 0)
    high = (bits >> 16) - ((127 - 12) << 7) + COARSE
    index = tl.where(r < 2.0**-12, low, high)
    index = tl.where(r == 0, BINS, tl.where(r >= 1, BINS + 1, index))
    known = there & (r == r)  # a NaN has no bin
    tl.atomic_add(counts + index, tl.full((TILE,), 1, tl.int64), mask=known, sem="relaxed")
