"""Draw the random integers of coordinates (kernels/random.py) in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.random import signed
from hvd_adaptive.kernels.triton.launch import kernel
from hvd_adaptive.kernels.triton.layout import for_each, place_of

COUNTER = tl.constexpr(random.COUNTER)
_GOLDEN64 = tl.constexpr(random.GOLDEN64)
_MIX64_A, _MIX64_B = tl.constexpr(random.MIX64_A), tl.constexpr(random.MIX64_B)
_MIX32_A, _MIX32_B = tl.constexpr(random.MIX32_A), tl.constexpr(random.MIX32_B)


def uniforms(coordinates, bucket_size, key, device):
    out = torch.empty(coordinates, dtype=torch.float32, device=device)
    for_each(_uniforms_kernel, out, bucket_size, signed(key), out)
    return out


@kernel
def _uniforms_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    stream: tl.int64,
    out,
    TILE: tl.constexpr,
    INSIDE: tl.constexpr,
):
    i, there, bucket = place_of(n, bucket_size, TILE, INSIDE)
    low, high = bucket_key(stream, bucket)
    place = (i - bucket * bucket_size).to(tl.uint32)
    tl.store(out + i, uniform24(place * COUNTER + low, high), mask=there)


@triton.jit
def bucket_key(stream, bucket):
    """Return low and high halves (uint32) of the keys of buckets (int64) in a stream (int64)."""
    key = stream.to(tl.uint64) + (bucket + 1).to(tl.uint64) * _GOLDEN64
    key = (key ^ (key >> 30)) * _MIX64_A
    key = (key ^ (key >> 27)) * _MIX64_B
    key = key ^ (key >> 31)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def integer24(counter, high):
    """Mix integers below 2**24 (int32) of counters j * COUNTER + low and high keys (uint32)."""
    return (mixed(counter, high) >> 8).to(tl.int32)


@triton.jit
def mixed(counter, high):
    """Mix 32-bit integers (uint32) as ``integer24``, which has their upper bits."""
    h = (counter ^ (counter >> 16)) * _MIX32_A + high
    return (h ^ (h >> 13)) * _MIX32_B


@triton.jit
def uniform24(counter, high):
    """Return ``integer24`` as float32."""
    return integer24(counter, high).to(tl.float32)
