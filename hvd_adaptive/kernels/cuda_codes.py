"""Triton: bare codes and random numbers, for schemes that pack in a step of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_adaptive.coding.packing import Packing
from hvd_adaptive.kernels.cuda_decode import unpack_add
from hvd_adaptive.kernels.cuda_encode import nothing, pack
from hvd_adaptive.kernels.cuda_launch import kernel
from hvd_adaptive.kernels.cuda_places import for_each, own_integer, own_place

# Buckets do not matter where bare codes are packed.
_ANY_BUCKET = 512


def uniforms(coordinates: int, bucket_size: int, key: int, device: torch.device) -> torch.Tensor:
    """See reference.uniforms."""
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


def pack_bytes(codes: torch.Tensor, packing: Packing, words: torch.Tensor) -> None:
    """Codes (uint8, (n,)) become words (int32)."""
    pack(
        codes,
        words,
        _ANY_BUCKET,
        packing,
        0,
        (codes,),
        PREPARE=nothing,
        CODE=_itself,
        RULE=_itself,
        OPTIONS=(),
    )


def unpack_bytes(words: torch.Tensor, packing: Packing, count: int) -> torch.Tensor:
    """Inverse of ``pack_bytes``: uint8 (count,)."""
    codes = torch.empty(count, dtype=torch.uint8, device=words.device)
    unpack_add([(words, words)], _ANY_BUCKET, packing, 1.0, codes, False, (codes,), VALUE=_bare)
    return codes


@triton.jit
def _itself(v, counter, high, about, state, i, there, rule: tl.constexpr, OPTIONS: tl.constexpr):
    return v.to(tl.uint32)


@triton.jit
def _bare(code, bucket, i, there, payload, state, OPTIONS: tl.constexpr):
    """A float32 holds a code; the sum is stored as a byte."""
    return code.to(tl.float32)
