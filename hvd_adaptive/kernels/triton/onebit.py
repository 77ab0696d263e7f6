"""Encode 1-bit SGD in Triton; triton/bucket.py decodes.

The signature and the numbers are the same as in reference/onebit.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import ONE_BIT
from hvd_adaptive.kernels.triton.encoder import nothing, pack
from hvd_adaptive.kernels.triton.lanes import bucket_sizes, fold, lane_tree
from hvd_adaptive.kernels.triton.launch import WARPS, kernel, launch


def encode(flat: torch.Tensor, means: torch.Tensor, words: torch.Tensor, bucket_size: int) -> None:
    """See reference.onebit.encode."""
    count = means.shape[0]
    launch(
        _means_kernel,
        -(-count // WARPS),
        flat,
        flat,
        means,
        flat.numel(),
        bucket_size,
        count,
        BUCKETS=WARPS,
    )
    pack(
        flat,
        words,
        bucket_size,
        ONE_BIT,
        0,
        (flat,),
        PREPARE=nothing,
        CODE=_side,
        RULE=_side,
        OPTIONS=(),
    )


@kernel
def _means_kernel(
    x, means, n: tl.int64, bucket_size: tl.int64, buckets: tl.int64, BUCKETS: tl.constexpr
):
    """Compute the means of a tile of buckets in each program."""
    b = tl.program_id(0).to(tl.int64) * BUCKETS + tl.arange(0, BUCKETS)[:, None]
    size = bucket_sizes(b, n, bucket_size)
    sums = tl.zeros((BUCKETS, 32), tl.float64)
    sides = (sums, sums, tl.zeros((BUCKETS, 32), tl.int64))
    low, high, negative = fold(x, b * bucket_size, size, tl.max(size), _add_sides, 0, sides)
    below = tl.reshape(lane_tree(low, BUCKETS), (BUCKETS, 1))
    above = tl.reshape(lane_tree(high, BUCKETS), (BUCKETS, 1))
    count = tl.reshape(tl.sum(negative, axis=1), (BUCKETS, 1))
    finite = tl.abs(below + above) < float("inf")
    lower = (below / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)
    upper = (above / tl.maximum(size - count, 1).to(tl.float64)).to(tl.float32)
    there = b < buckets
    tl.store(means + 2 * b, tl.where(finite, lower, float("nan")), mask=there)
    tl.store(means + 2 * b + 1, tl.where(finite, upper, float("nan")), mask=there)


@triton.jit
def _add_sides(v, state, sums):
    below, wide = v < 0, v.to(tl.float64)
    low, high = sums[0] + tl.where(below, wide, 0.0), sums[1] + tl.where(below, 0.0, wide)
    return low, high, sums[2] + below.to(tl.int64)


@triton.jit
def _side(v, counter, high, about, state, i, there, rule: tl.constexpr, OPTIONS: tl.constexpr):
    return tl.where(v < 0, 0, 1).to(tl.uint32)
