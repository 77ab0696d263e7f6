"""Sum over buckets in the fixed tree of 32 lanes in Triton, a warp for each bucket.

Tiles are (buckets, 32): lane l of a bucket adds its coordinates l, l + 32, ... in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(32)
# The loads of so many rows are under way together.
UNROLL = tl.constexpr(16)


@triton.jit
def lane_tree(lanes, BUCKETS: tl.constexpr):
    """Sum the 32 lanes by adding halves, (BUCKETS, 32) to (BUCKETS,)."""
    total = tl.sum(tl.reshape(lanes, (BUCKETS, 2, 16)), axis=1)
    total = tl.sum(tl.reshape(total, (BUCKETS, 2, 8)), axis=1)
    total = tl.sum(tl.reshape(total, (BUCKETS, 2, 4)), axis=1)
    total = tl.sum(tl.reshape(total, (BUCKETS, 2, 2)), axis=1)
    return tl.sum(total, axis=1)


@triton.jit
def bucket_sizes(buckets, n, bucket_size):
    """Return the coordinates of buckets (int64), 0 beyond the last one."""
    return tl.minimum(tl.maximum(n - buckets * bucket_size, 0), bucket_size)


@triton.jit
def clamped(v, limit):
    """Return v within ``limit``; NaN if the limit is NaN."""
    low = limit * -1.0  # of 0 Triton's own minus makes +0
    v = tl.where(v < low, low, v)
    v = tl.where(v > limit, limit, v)
    return tl.where(limit == limit, v, limit)


@triton.jit
def fold(x, begin, size, longest, term: tl.constexpr, state, total, other=0.0):
    """Fold term(v, state, total) into total over the coordinates v = x[begin : begin + size] of
    each lane, in order. ``other``, which must change nothing, replaces missing coordinates.

    begin, size: int64 (buckets, 1). longest: no size is larger. total: (buckets, 32).
    """
    lane = tl.arange(0, 32)[None, :]
    at = x + begin + lane
    left = size - lane  # a row that begins at r has this lane's coordinate where r < left
    for row in range(0, longest, UNROLL * LANES):
        for k in tl.static_range(UNROLL):
            v = tl.load(at + (row + k * LANES), mask=row + k * LANES < left, other=other)
            total = term(v, state, total)
    return total


@triton.jit
def _add_square(v, state, total):
    """Add the square of ``v``, clipped and then multiplied; state: limit, CLIP, factor."""
    if state[1]:
        v = clamped(v, state[0])
    v = v * state[2]
    return total + v * v


@triton.jit
def _largest_bits(v, state, total):
    """Keep the largest bits of ``v``, clipped; state: limit, CLIP. Infinite or NaN bit patterns are
    larger than every finite one.
    """
    if state[1]:
        v = clamped(v, state[0])
    return tl.maximum(total, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def norms_of(
    x, begin, size, longest, limit, BUCKETS: tl.constexpr, LINF: tl.constexpr, CLIP: tl.constexpr
):
    """Return norms (BUCKETS, 1) of buckets: see reference.bucket_norms. limit: of |v|, if CLIP."""
    if LINF:
        bits = tl.zeros((BUCKETS, 32), tl.int32)
        bits = fold(x, begin, size, longest, _largest_bits, (limit, CLIP), bits)
        norm = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    else:
        zeros = tl.zeros((BUCKETS, 32), tl.float32)
        one = tl.full((BUCKETS, 1), 1.0, tl.float32)
        lanes = fold(x, begin, size, longest, _add_square, (limit, CLIP, one), zeros)
        total = lane_tree(lanes, BUCKETS)
        factor = tl.where(total < 2.0**-80, 2.0**96, tl.where(total <= 2.0**120, 1.0, 2.0**-96))
        # In rare cases a sum leaves the safe range: it is computed again, scaled.
        if tl.max((factor != 1.0).to(tl.int32), axis=0) > 0:
            scale = tl.reshape(factor, (BUCKETS, 1))
            lanes = fold(x, begin, size, longest, _add_square, (limit, CLIP, scale), zeros)
            total = lane_tree(lanes, BUCKETS)
        back = tl.where(factor > 1.0, 2.0**-96, tl.where(factor < 1.0, 2.0**96, 1.0))
        norm = tl.sqrt_rn(total) * back
    norm = tl.where(norm < 2.0**-126, 0.0, norm)
    norm = tl.where(norm < float("inf"), norm, float("nan"))
    return tl.reshape(norm, (BUCKETS, 1))


@triton.jit
def norm_of(x, begin, size, limit, LINF: tl.constexpr, CLIP: tl.constexpr):
    """Return the norm of one bucket; all arguments are scalars."""
    zero = tl.zeros((1, 1), tl.int64)
    limits = limit + tl.zeros((1, 1), tl.float32)
    return tl.sum(norms_of(x, begin + zero, size + zero, size, limits, 1, LINF, CLIP))
