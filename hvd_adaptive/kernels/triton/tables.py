"""Quantise to level tables, and compute norms, in Triton."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from hvd_adaptive.kernels.packing import check_sections
from hvd_adaptive.kernels.random import signed
from hvd_adaptive.kernels.tables import KernelTable, errors_of
from hvd_adaptive.kernels.tables import histogram as histogram
from hvd_adaptive.kernels.triton import quantize
from hvd_adaptive.kernels.triton.decoder import unpack_add
from hvd_adaptive.kernels.triton.encoder import Scheme, Tile, pack, pack_tile
from hvd_adaptive.kernels.triton.lanes import bucket_sizes, clamped, norm_of, norms_of
from hvd_adaptive.kernels.triton.launch import WARPS, kernel, launch, multiprocessors, on_device
from hvd_adaptive.kernels.triton.layout import Tensor, for_each, layout_of, place_of
from hvd_adaptive.kernels.triton.uniforms import COUNTER, bucket_key

# Norm and codes come from one launch if a bucket is whole tiles of a warp and not longer than this:
# a warp walks over the bucket, and reads it again from the L2 cache.
_TILE, _MOST_FUSED = 1024, 1 << 16
# Below so many buckets for each multiprocessor, so many warps share a bucket: each sums all of it
# (the tree's order allows no less), then packs a part.
_WARPS_OF_FEW = ((2, 8), (8, 4))


def encode(flat, scales, words, bucket_size, norm, table, key, clip=None):
    rule, numbers, sizes = quantize.rule_of(table, flat.device)
    limits = scales if clip is None else _clip_limits(flat, bucket_size, clip)
    state = (scales, limits, *numbers)
    options = (table.thresholds, table.base, table.alphabet, int(clip is not None), *sizes)
    scheme: dict[str, Any] = {"CODE": rule, "OPTIONS": options}
    if table.packing.digits == 1 and bucket_size % _TILE == 0 and bucket_size <= _MOST_FUSED:
        load = scales.numel() / multiprocessors(flat.device)
        warps = next((warps for least, warps in _WARPS_OF_FEW if load < least), 1)
        lane_words = table.packing.words(flat.numel()) // 16
        args = flat, words, flat.numel(), bucket_size, lane_words, signed(key), state
        scheme |= {"LINF": norm == "linf", "LAYOUT": layout_of(table.packing, bucket_size, warps)}
        launch(_fused_kernel, scales.numel(), flat, *args, num_warps=warps, **scheme)
        return
    _fill_norms(flat, bucket_size, norm, None if clip is None else limits, scales)
    scheme["PREPARE"] = quantize.prepare
    pack(flat, words, bucket_size, table.packing, key, state, **scheme)


def decode_add(payloads, bucket_size, table, factor, out, add=True):
    n = out.numel()
    check_sections(payloads, "scales", -(-n // bucket_size), table.packing.words(n))
    state = (_values(table, out.device),)
    unpack_add(payloads, bucket_size, table.packing, factor, out, add, state, VALUE=_scaled_level)


def bucket_norms(flat, bucket_size, norm):
    norms = flat.new_empty(-(-flat.numel() // bucket_size))
    _fill_norms(flat, bucket_size, norm, None, norms)
    return norms


def errors(flat, bucket_size, norm, table):
    return errors_of(flat, bucket_norms(flat, bucket_size, norm), bucket_size, table)


def _fill_norms(
    flat: torch.Tensor,
    bucket_size: int,
    norm: str,
    limits: torch.Tensor | None,
    norms: torch.Tensor,
) -> None:
    """Fill ``norms`` (float32, (buckets,)) with those of ``flat``, within any limits given."""
    some, count = norms if limits is None else limits, norms.numel()
    args = flat, norms, some, flat.numel(), bucket_size, count
    constants = {"BUCKETS": WARPS, "LINF": norm == "linf", "CLIP": limits is not None}
    launch(_norms_kernel, -(-count // WARPS), flat, *args, **constants)


def _clip_limits(flat: torch.Tensor, bucket_size: int, clip: float) -> torch.Tensor:
    """Return limits of the buckets' magnitudes, float32: see reference.tables.clipped."""
    limits = bucket_norms(flat, bucket_size, "l2")
    rest = flat.numel() - (limits.numel() - 1) * bucket_size
    for part, size in ((limits[:-1], bucket_size), (limits[-1:], rest)):
        part *= float(np.float32(clip / np.sqrt(np.float64(max(size, 1)))))
    return limits


def clipped(flat, bucket_size, clip):
    limits, out = _clip_limits(flat, bucket_size, clip), torch.empty_like(flat)
    for_each(_clip_kernel, flat, bucket_size, flat, limits, out)
    return out


@triton.jit
def _scaled_level(code, bucket, there, scales, state, OPTIONS: tl.constexpr):
    """Multiply a shared table's value by the bucket's scale."""
    scale = tl.load(scales + bucket, mask=there, other=0.0)
    return tl.load(state[0] + code) * scale


@functools.lru_cache(maxsize=64)
def _values(table: KernelTable, device: torch.device) -> torch.Tensor:
    return on_device(table.values, device)


@kernel
def _fused_kernel(
    x,
    words,
    n: tl.int64,
    bucket_size: tl.int64,
    lane_words: tl.int64,
    stream: tl.int64,
    state,
    LINF: tl.constexpr,
    LAYOUT: tl.constexpr,
    CODE: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Compute a bucket's norm in each program, then its codes, a tile of segments at a time."""
    bucket = tl.program_id(0).to(tl.int64)
    size = tl.minimum(n - bucket * bucket_size, bucket_size)
    limit = tl.load(state[1] + bucket) if OPTIONS[3] else 0.0
    norm = norm_of(x, bucket * bucket_size, size, limit, LINF, OPTIONS[3])
    tl.store(state[0] + bucket, norm)
    inverse, usable = quantize.of_scale(norm)
    about = (inverse, usable, limit)
    low, high = bucket_key(stream, bucket)
    tensor = Tensor(x, n, bucket_size, bucket)
    thread = tl.arange(0, 16 * LAYOUT.tile)
    for first in range(0, bucket_size, LAYOUT.tile * 512):
        within = first + (thread // 16).to(tl.int64) * 512
        # A tile may reach beyond its bucket: those segments belong to no tensor.
        segment = tl.where(within < bucket_size, (bucket * bucket_size + within) // 512, 1 << 50)
        own = (within.to(tl.uint32) * COUNTER + low, high, about)
        tile = Tile(segment, thread % 16, bucket, within, own, own)
        pack_tile(
            tensor,
            tile,
            words,
            lane_words,
            # Nothing reads PREPARE, the number of buckets, and magic: segments lie in one bucket.
            Scheme(CODE, CODE, state, OPTIONS, bucket, stream),
            LAYOUT,
        )


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
    n: tl.int64, bucket_size: tl.int64, x, limits, out, TILE: tl.constexpr, INSIDE: tl.constexpr
):
    i, there, bucket = place_of(n, bucket_size, TILE, INSIDE)
    limit = tl.load(limits + bucket, mask=there, other=0.0)
    tl.store(out + i, clamped(tl.load(x + i, mask=there, other=0.0), limit), mask=there)
