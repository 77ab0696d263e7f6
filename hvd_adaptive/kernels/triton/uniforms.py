"""Draw the random integers of coordinates (kernels/random.py) in Triton."""

from __future__ import annotations

import torch
import triton.language as tl

from hvd_adaptive.kernels.triton.launch import kernel
from hvd_adaptive.kernels.triton.places import for_each, own_integer, own_place


def uniforms(coordinates: int, bucket_size: int, key: int, device: torch.device) -> torch.Tensor:
    out = torch.empty(coordinates, dtype=torch.float32, device=device)
    for_each(_uniforms_kernel, out, coordinates, bucket_size, key, out)
    return out


@kernel
def _uniforms_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    out,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    i, there, bucket, place = own_place(n, bucket_size, magic, TILE, BUCKETS)
    tl.store(out + i, own_integer(stream, bucket, place).to(tl.float32), mask=there)
