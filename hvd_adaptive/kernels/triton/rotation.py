"""Rotate buckets by random signs and Hadamard matrices in Triton (EDEN), and rotate them back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels import eden
from hvd_adaptive.kernels.eden import APART, SPAN, block_order
from hvd_adaptive.kernels.random import signed
from hvd_adaptive.kernels.triton.launch import kernel, launch
from hvd_adaptive.kernels.triton.uniforms import COUNTER, bucket_key, mixed

_APART, _SPAN = tl.constexpr(APART), tl.constexpr(SPAN)
_TILE = 1024
# A larger tile would not fit the registers.
LARGEST = 1 << 14
_FULL_TILE = 1 << 12
_COORDINATES_PER_WARP = 1 << 10


def rotate(
    y: torch.Tensor, numbers: torch.Tensor, stream: int, back: bool = False, factor: float = 1.0
) -> None:
    """Rotate rows y (float32, (buckets, length), contiguous) in place, or undo it and multiply by
    ``factor``: see kernels.eden.rotate, which leaves the factor of some H out. numbers: the rows'
    buckets (int64), on the same device.
    """
    rows, length = y.shape
    if block_order(length) == length <= LARGEST:
        each, warps = tile_of(length)
        args = y, numbers, rows, signed(stream), factor
        constants = {"EACH": each, "ORDER": length, "BEFORE": not back, "num_warps": warps}
        launch(_transform_kernel, -(-rows // each), y, *args, **constants)
        return

    def flip(turn: int) -> None:
        args = y, numbers + turn, y.numel(), length, signed(stream)
        launch(_flip_kernel, -(-y.numel() // _TILE), y, *args, TILE=_TILE)

    eden.rotate(y, flip, back)
    if factor != 1.0:
        y *= factor


@triton.jit
def _signed(v, stream, bucket, place):
    """Return v with the signs of places (int32) in buckets (int64): see kernels/eden.py."""
    low, high = bucket_key(stream, bucket)
    counter = (place // _SPAN * _APART + place % _APART).to(tl.uint32)
    h = mixed(counter * COUNTER + low, high)
    negative = (h >> (place // _APART % 32).to(tl.uint32)) & 1
    return tl.where(negative != 0, v * -1.0, v)


@kernel
def _transform_kernel(
    y,
    numbers,
    rows: tl.int64,
    stream: tl.int64,
    factor,
    EACH: tl.constexpr,
    ORDER: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """Transform EACH rows of ORDER in each program, with signs before or after."""
    first = tl.program_id(0).to(tl.int64) * EACH
    at = tl.arange(0, EACH * ORDER)
    row, place = first + at // ORDER, at % ORDER
    there = row < rows
    bucket = tl.load(numbers + row, mask=there, other=0)
    i = first * ORDER + at
    v = tl.load(y + i, mask=there, other=0.0)
    if BEFORE:
        v = _signed(v, stream, bucket, place)
    v = butterflies(v, EACH * ORDER, ORDER)
    if not BEFORE:
        v = _signed(v, stream, bucket, place)
    tl.store(y + i, v * tl.cast(factor, tl.float32), mask=there)


@kernel
def _flip_kernel(y, numbers, n: tl.int64, length: tl.int64, stream: tl.int64, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = i < n
    bucket = tl.load(numbers + i // length, mask=there, other=0)
    v = tl.load(y + i, mask=there, other=0.0)
    tl.store(y + i, _signed(v, stream, bucket, (i % length).to(tl.int32)), mask=there)


def tile_of(order: int) -> tuple[int, int]:
    """Return how many transforms of an order a program does, and its warps."""
    each = max(1, _FULL_TILE // order)
    return each, max(4, each * order // _COORDINATES_PER_WARP)


@triton.jit
def butterflies(x, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Apply strides SIZE/2, ..., 1 in turn to COUNT numbers (a power of two)."""
    if SIZE > 1:
        HALF: tl.constexpr = SIZE // 2
        pairs = tl.permute(tl.reshape(x, (COUNT // SIZE, 2, HALF)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (COUNT,))
        x = butterflies(x, COUNT, HALF)
    return x
