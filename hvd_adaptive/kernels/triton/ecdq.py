"""Quantise with dither in Triton; dithered_encode.py codes the integers.

Functions and integers are the same as in reference/ecdq.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.dithered import HALF, step_factors
from hvd_adaptive.kernels.triton.launch import kernel
from hvd_adaptive.kernels.triton.places import for_each, own_integer, own_place
from hvd_adaptive.kernels.triton.scan import bucket_norms

_HALF = tl.constexpr(HALF)
_WHOLE = tl.constexpr(2.0**23)  # all floats from this one on are whole numbers


def bucket_steps(flat: torch.Tensor, bucket_size: int, delta: float) -> torch.Tensor:
    """See reference.ecdq.bucket_steps."""
    steps = bucket_norms(flat, bucket_size, "l2")
    whole, last = step_factors(flat.numel(), bucket_size, delta).tolist()
    steps[:-1] *= whole
    steps[-1:] *= last
    steps = torch.where(steps < SMALLEST_NORM, torch.zeros_like(steps), steps)
    return torch.where(steps.isfinite(), steps, torch.full_like(steps, torch.nan))


def quantize(flat: torch.Tensor, steps: torch.Tensor, bucket_size: int, key: int) -> torch.Tensor:
    """See reference.ecdq.quantize."""
    q = torch.empty(flat.numel(), dtype=torch.int32, device=flat.device)
    for_each(_quantize_kernel, flat, flat.numel(), bucket_size, key, flat, steps, q)
    return q


def add(
    q: torch.Tensor, steps: torch.Tensor, bucket_size: int, key: int, out: torch.Tensor
) -> None:
    """See reference.ecdq.add."""
    for_each(_add_kernel, out, out.numel(), bucket_size, key, q, steps, out)


@triton.jit
def dither(stream, bucket, place):
    """Return whether the dither is negative, and m (int32)."""
    k = own_integer(stream, bucket, place)
    negative = k >= _HALF
    return negative, tl.where(negative, k - _HALF, k)


@triton.jit
def _rounded(t):
    """Round to the nearest whole number, to even at halves."""
    up, down = (t + _WHOLE) - _WHOLE, (t - _WHOLE) + _WHOLE
    return tl.where(tl.abs(t) < _WHOLE, tl.where(t < 0, down, up), t)


@triton.jit
def quantized(v, step, negative, m):
    """Return q (int32) of coordinates, 0 in buckets without a step above 0."""
    usable = step > 0
    inverse = tl.where(usable, tl.div_rn(tl.full(v.shape, 1.0, tl.float32), step), 0.0)
    rounded = _rounded(tl.where(negative, v * -1.0, v) * inverse + _size(m))
    return tl.where(usable, rounded, 0.0).to(tl.int32)


@triton.jit
def value_of(q, step, negative, m):
    """Return the decoded value of q (int32); NaN if the step is NaN."""
    value = (q.to(tl.float32) - _size(m)) * step
    value = tl.where(negative, value * -1.0, value)
    return tl.where(step > 0, value, tl.where(step != step, step, 0.0))


@triton.jit
def _size(m):
    return (m.to(tl.float32) + 0.5) * 2.0**-24


@kernel
def _quantize_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    x,
    steps,
    q,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    i, there, bucket, place = own_place(n, bucket_size, magic, TILE, BUCKETS)
    negative, m = dither(stream, bucket, place)
    step = tl.load(steps + bucket, mask=there, other=0.0)
    v = tl.load(x + i, mask=there, other=0.0)
    tl.store(q + i, quantized(v, step, negative, m), mask=there)


@kernel
def _add_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    q,
    steps,
    out,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    i, there, bucket, place = own_place(n, bucket_size, magic, TILE, BUCKETS)
    negative, m = dither(stream, bucket, place)
    step = tl.load(steps + bucket, mask=there, other=0.0)
    value = value_of(tl.load(q + i, mask=there, other=0), step, negative, m)
    tl.store(out + i, tl.load(out + i, mask=there, other=0.0) + value, mask=there)
