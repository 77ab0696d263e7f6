"""Code bodies of dithered payloads (kernels/dithered.py) in Triton, byte for byte the CPU's.

All steps are queued; none waits for the device:

1. Each tile quantises and puts its symbols into the runs of its segment. Escapes are counted.
2. One lane for each run adds up its codes' bits. Sums of these give the place of each run's codes
   and of each tile's escapes, and decide if integers would be shorter.
3. One lane for each run writes its codes, each tile its escapes; or else each tile its integers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hvd_adaptive.device import HostCopy
from hvd_adaptive.kernels.constants import LAST_END
from hvd_adaptive.kernels.triton import ecdq, prefix_streams
from hvd_adaptive.kernels.triton.dithered_runs import (
    Runs,
    Shape,
    books_of,
    counts_of,
    group_of,
    ranks_of,
)
from hvd_adaptive.kernels.triton.ecdq import dither, quantized
from hvd_adaptive.kernels.triton.launch import kernel, whole_words
from hvd_adaptive.kernels.triton.places import place_of


def encode(
    flat: torch.Tensor,
    bucket_size: int,
    code: Any,
    key: int,
    width: int,
    body: torch.Tensor,
    segment: int,
) -> HostCopy:
    """Run reference.dithered.encode_body on the device, for at least one coordinate.

    segment: whole tiles or less than a tile.
    """
    shape = Shape(flat.numel(), bucket_size, segment, len(code.books))
    steps = ecdq.bucket_steps(flat, bucket_size, code.delta)
    filled = whole_words(body)
    words = filled.view(torch.int32)
    words[:1].zero_()
    words[1 : shape.words].copy_(steps.view(torch.int32))
    if 8 * shape.segments <= width * shape.n:
        fits, used = _put_segments(flat, steps, key, width, words, code, shape)
    else:
        fits = torch.zeros(1, dtype=torch.int64, device=flat.device)
        used = fits + width * shape.n
    shape.launch(
        _integers_kernel,
        shape.tiles,
        flat,
        key,
        flat,
        steps,
        fits,
        words,
        filled[4 * shape.words :],
        WIDTH=width,
    )
    if filled is not body:
        body.copy_(filled[: body.numel()])
    return HostCopy(used + 4 * shape.words)


def _put_segments(
    flat: torch.Tensor,
    steps: torch.Tensor,
    key: int,
    width: int,
    words: torch.Tensor,
    code: Any,
    shape: Shape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill ``words`` behind the steps if segments fit; return whether they do (int64, one number),
    and the bytes behind the steps (int64).
    """
    books, listed = books_of(code, flat.device), 2 * shape.segments
    counts = counts_of(steps, key, shape)
    runs = Runs.of(counts, shape)
    symbols = torch.empty(shape.n, dtype=books.pool.dtype, device=flat.device)
    escapes = torch.empty(counts.shape[::2], dtype=torch.int32, device=flat.device)
    shape.launch(
        _split_kernel, shape.tiles, flat, key, flat, steps, runs.bases, symbols, escapes, code.most
    )
    bits = prefix_streams.lengths(symbols, runs.begins, runs.counts, books)
    bits = bits.view(shape.segments, -1).to(torch.int64)
    sizes = torch.stack([(bits.sum(1) + 7) // 8, escapes.sum(1)], 1).view(-1)
    ends = sizes.cumsum(0)
    used = ends[-1:] + 4 * listed
    room = min(width * shape.n, 4 * listed + LAST_END)
    fits = (used <= room).to(torch.int64)
    data = words[shape.words :]
    data.zero_()
    data[:listed].copy_(ends.to(torch.int32))
    starts = (ends - sizes + 4 * listed).view(-1, 2)
    places = (8 * starts[:, :1] + bits.cumsum(1) - bits).view(-1)
    prefix_streams.write(symbols, runs.begins, runs.counts, places, fits, data, books)
    offsets = starts[:, 1:] + escapes.cumsum(1) - escapes
    shape.launch(
        _escapes_kernel,
        shape.tiles,
        flat,
        key,
        flat,
        steps,
        escapes,
        offsets,
        fits,
        data.view(torch.uint8),
        code.most,
    )
    return fits, torch.where(fits > 0, used, width * shape.n)


@triton.jit
def _number(q, most):
    """Return whether integers (int32) escape, their numbers (int64) and the bytes of these."""
    size = tl.abs(q.to(tl.int64))
    number = 2 * (size - most - 1) + (q < 0).to(tl.int64)
    count = 1 + (number >= 1 << 7).to(tl.int64) + (number >= 1 << 14).to(tl.int64)
    count += (number >= 1 << 21).to(tl.int64) + (number >= 1 << 28).to(tl.int64)
    escapes = size > most
    return escapes, number, tl.where(escapes, count, 0)


@triton.jit
def _quantized_tile(
    tile, n, bucket_size, magic, stream, x, steps, TILE: tl.constexpr, BUCKETS: tl.constexpr
):
    """Return a tile's places, which of them exist, and their dithers, steps and integers."""
    i, there, bucket, place = place_of(tile, n, bucket_size, magic, TILE, BUCKETS)
    negative, m = dither(stream, bucket, place)
    step = tl.load(steps + bucket, mask=there, other=0.0)
    v = tl.load(x + i, mask=there, other=0.0)
    return i, there, m, step, quantized(v, step, negative, m)


@kernel
def _split_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    x,
    steps,
    bases,
    symbols,
    escapes,
    most: tl.int64,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """Put a tile's symbols into its segment's runs in each program; store its escapes' bytes."""
    tile = tl.program_id(0).to(tl.int64)
    _i, _there, m, step, q = _quantized_tile(
        tile, n, bucket_size, magic, stream, x, steps, TILE, BUCKETS
    )
    escaped, _, count = _number(q, most)
    tl.store(escapes + tile, tl.sum(count, 0).to(tl.int32))
    group = group_of(m, CLASSES)
    TILES: tl.constexpr = SEGMENT // TILE
    rank, _total = ranks_of(step > 0, group)
    segment = tile // TILES
    base = tl.load(bases + (segment * 4 + group) * TILES + tile % TILES)
    symbol = tl.where(escaped, 2 * most + 1, q + most)
    target = symbols + segment * SEGMENT + base + rank
    tl.store(target, symbol.to(symbols.dtype.element_ty), mask=step > 0)


@kernel
def _escapes_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    x,
    steps,
    escapes,
    offsets,
    fits,
    out,
    most: tl.int64,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """Write the bytes of a tile's escapes in each program, if there are any and segments fit."""
    tile = tl.program_id(0).to(tl.int64)
    if (tl.load(fits) != 0) & (tl.load(escapes + tile) > 0):
        _i, _there, _m, _step, q = _quantized_tile(
            tile, n, bucket_size, magic, stream, x, steps, TILE, BUCKETS
        )
        _escaped, number, count = _number(q, most)
        target = out + tl.load(offsets + tile) + tl.cumsum(count, 0) - count
        for k in tl.static_range(5):
            byte = ((number >> (7 * k)) & 127) + tl.where(k + 1 < count, 128, 0)
            tl.store(target + k, byte.to(tl.uint8), mask=k < count)


@kernel
def _integers_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    x,
    steps,
    fits,
    kind,
    out,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CLASSES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write a tile's integers in each program, if segments do not fit."""
    tile = tl.program_id(0).to(tl.int64)
    if tl.load(fits) == 0:
        i, there, _m, _step, q = _quantized_tile(
            tile, n, bucket_size, magic, stream, x, steps, TILE, BUCKETS
        )
        for k in tl.static_range(WIDTH):
            tl.store(out + i * WIDTH + k, ((q >> (8 * k)) & 0xFF).to(tl.uint8), mask=there)
        tl.store(kind, WIDTH, mask=tile == 0)
