"""Decode dithered payloads (kernels/dithered.py) in Triton; flag the bodies that the CPU refuses.

A lane reads the codes of each segment of each payload; the segments' escapes are read side by side.
Then a program for each segment adds the segment's values, payload by payload. No byte outside a
body is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from hvd_adaptive.device import HostCopy
from hvd_adaptive.kernels.triton import prefix_streams
from hvd_adaptive.kernels.triton.dithered_runs import (
    IMPOSSIBLE_STEPS,
    Runs,
    Shape,
    books_of,
    counts_of,
    group_of,
    ranks_of,
)
from hvd_adaptive.kernels.triton.ecdq import dither, value_of
from hvd_adaptive.kernels.triton.launch import kernel, launch, whole_words
from hvd_adaptive.kernels.triton.places import place_of
from hvd_adaptive.kernels.triton.prefix_streams import byte_of, segment_ends

_TILE = 1024
# Decoders' symbols use so many bytes at most; payloads beyond are decoded afterwards.
MOST_SCRATCH = 1 << 28
# Flags of faults in a body; another is SEGMENT_FLAG plus the segment's number.
_KIND, _END = tl.constexpr(IMPOSSIBLE_STEPS + 1), tl.constexpr(IMPOSSIBLE_STEPS + 2)
REASONS = {
    IMPOSSIBLE_STEPS: "payload holds impossible steps",
    _KIND.value: "payload's body is of no kind that there is",
    _END.value: "payload's body goes on behind its end",
}


def add(
    bodies: Sequence[torch.Tensor],
    bucket_size: int,
    code: Any,
    keys: Sequence[int],
    width: int,
    out: torch.Tensor,
    segment: int,
) -> HostCopy:
    """Add the bodies' values to ``out`` in order; return flags as a ``HostCopy``.

    The flags are int32, one for each body: 0, one of REASONS, or SEGMENT_FLAG plus the number of a
    corrupt segment.

    bodies: uint8, long enough for their steps.
    """
    shape = Shape(out.numel(), bucket_size, segment, len(code.books))
    books, words = (
        books_of(code, out.device),
        [whole_words(body, True).view(torch.int32) for body in bodies],
    )
    flags = torch.zeros(len(bodies), dtype=torch.int32, device=out.device)
    batch = max(1, MOST_SCRATCH // (shape.n * books.pool.element_size()))
    for first in range(0, len(bodies), batch):
        of_batch = slice(first, first + batch)
        _add(words[of_batch], keys[of_batch], code.most, width, out, shape, books, flags[of_batch])
    return HostCopy(flags)


def _add(
    bodies: Sequence[torch.Tensor],
    keys: Sequence[int],
    most: int,
    width: int,
    out: torch.Tensor,
    shape: Shape,
    books: prefix_streams.Tables,
    flags: torch.Tensor,
) -> None:
    """Add bodies (int32) whose codes are read at the same time."""
    symbols = torch.empty(len(bodies), shape.n, dtype=books.pool.dtype, device=out.device)
    steps = [body[1 : shape.words].view(torch.float32) for body in bodies]
    runs = [
        Runs.of(counts_of(own, key, shape, flag), shape)
        for own, key, flag in zip(steps, keys, flags.split(1), strict=True)
    ]
    prefix_streams.read(
        bodies,
        shape.words,
        shape.segments,
        2,
        torch.cat([own.begins + k * shape.n for k, own in enumerate(runs)]),
        torch.cat([own.counts for own in runs]),
        books,
        symbols.view(-1),
        flags,
    )
    for k, (body, key) in enumerate(zip(bodies, keys, strict=True)):
        size = 4 * (body.numel() - shape.words)
        escaped = torch.empty(size, dtype=torch.int32, device=out.device)
        found = torch.empty(shape.segments, dtype=torch.int32, device=out.device)
        launch(
            _numbers_kernel,
            shape.segments,
            out,
            body,
            shape.words,
            size,
            shape.segments,
            escaped,
            found,
            most,
            TILE=_TILE,
        )
        shape.launch(
            _add_kernel,
            shape.segments,
            out,
            key,
            body,
            shape.words,
            size,
            steps[k],
            runs[k].bases,
            symbols[k],
            escaped,
            found,
            flags[k:],
            most,
            out,
            WIDTH=width,
            FLAG=prefix_streams.SEGMENT_FLAG,
        )


@kernel
def _numbers_kernel(
    words,
    head: tl.int64,
    size: tl.int64,
    segments: tl.int64,
    values,
    found,
    most: tl.int64,
    TILE: tl.constexpr,
):
    """Read the escaped integers of a segment in each program, and their number; -1 if they cannot
    be read. The integers of a segment whose escapes begin at byte b begin at ``values + b``.
    """
    segment = tl.program_id(0).to(tl.int64)
    there = (tl.load(words) == 0) & (size >= 8 * segments)
    listed, data = head * 4, head * 4 + 8 * segments
    _start, middle, stop, good = segment_ends(words, listed, size, segment, segments, there, 2)
    middle, stop = tl.where(good, middle, 0), tl.where(good, stop, 0)
    total, wrong = segment * 0, segment * 0
    for first in range(middle, stop, TILE):
        at = first + tl.arange(0, TILE)
        byte = byte_of(words, at, at < stop).to(tl.int64)
        ends = (at < stop) & (byte < 128)
        value, joined = byte, ends
        for k in tl.static_range(1, 6):
            before = byte_of(words, at - k, joined & (at - k >= middle)).to(tl.int64)
            joined = joined & (before >= 128)
            value = tl.where(joined, (value << 7) | (before & 127), value)
            # The last of several bytes is never 0; an integer has five at most.
            bad = joined & ((byte == 0) | (k == 5))
            wrong += tl.sum(bad.to(tl.int64), 0)
        wrong += tl.sum((ends & (value >= 1 << 31)).to(tl.int64), 0)
        unfinished = (at == stop - 1) & (byte >= 128)
        wrong += tl.sum(unfinished.to(tl.int64), 0)
        size_of = (value >> 1) + most + 1
        number = tl.where((value & 1) != 0, size_of * -1, size_of)
        place = total + tl.cumsum(ends.to(tl.int64), 0) - 1
        tl.store(values + (middle - data) + place, number.to(tl.int32), mask=ends)
        total += tl.sum(ends.to(tl.int64), 0)
    readable = good & (wrong == 0)
    tl.store(found + segment, tl.where(readable, total, -1).to(tl.int32))


@kernel
def _add_kernel(
    n: tl.int64,
    bucket_size: tl.int64,
    magic: tl.int64,
    stream: tl.int64,
    words,
    head: tl.int64,
    size: tl.int64,
    steps,
    bases,
    symbols,
    values,
    found,
    flag,
    most: tl.int64,
    out,
    TILE: tl.constexpr,
    BUCKETS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CLASSES: tl.constexpr,
    WIDTH: tl.constexpr,
    FLAG: tl.constexpr,
):
    """Add the values of a segment in each program."""
    segment = tl.program_id(0).to(tl.int64)
    segments = (n + SEGMENT - 1) // SEGMENT
    kind = tl.load(words)
    coded = (kind == 0) & (size >= 8 * segments)
    rest = size - WIDTH * n
    plain = (kind == WIDTH) & (rest >= 0)
    if segment == 0:
        wrong = tl.where(coded | (kind == WIDTH), 0, _KIND)
        if kind == WIDTH:
            at = tl.arange(0, 8)
            padding = byte_of(words, 4 * head + WIDTH * n + at, plain & (at < rest))
            wrong = tl.where(plain & (rest <= 7) & (tl.max(padding, 0) == 0), 0, _END)
        tl.atomic_max(flag, wrong, mask=wrong > 0, sem="relaxed")
    count = tl.load(found + segment).to(tl.int64)
    own = tl.load(words + head + 2 * segment, mask=coded, other=0)
    values += tl.where(count > 0, own.to(tl.uint32, bitcast=True).to(tl.int64), 0)
    met = segment * 0
    TILES: tl.constexpr = SEGMENT // TILE
    for t in range(TILES):
        i, there, bucket, place = place_of(
            segment * TILES + t, n, bucket_size, magic, TILE, BUCKETS
        )
        negative, m = dither(stream, bucket, place)
        step = tl.load(steps + bucket, mask=there, other=0.0)
        q = tl.zeros((TILE,), tl.int32)
        if coded:
            group = group_of(m, CLASSES)
            rank, _total = ranks_of(step > 0, group)
            base = tl.load(bases + (segment * 4 + group) * TILES + t)
            source = symbols + segment * SEGMENT + base + rank
            q = tl.load(source, mask=step > 0, other=0).to(tl.int32) - most.to(tl.int32)
            escaped = (step > 0) & (q > most)
            number = met + tl.cumsum(escaped.to(tl.int64), 0) - 1
            known = escaped & (number < count)
            q = tl.where(known, tl.load(values + number, mask=known, other=0), q)
            met += tl.sum(escaped.to(tl.int64), 0)
        elif plain:
            for k in tl.static_range(WIDTH):
                byte = byte_of(words, 4 * head + WIDTH * i + k, there)
                q = q | (byte << (8 * k))
            q = (q << (32 - 8 * WIDTH)) >> (32 - 8 * WIDTH)
        value = value_of(q, step, negative, m)
        tl.store(out + i, tl.load(out + i, mask=there, other=0.0) + value, mask=there)
    if coded & (met != count):
        tl.atomic_max(flag, (segment + FLAG).to(tl.int32), sem="relaxed")
