"""Rotate, quantise and pack (EDEN) in Numba, bucket by bucket in the L1 cache.

Signatures and integers are the same as in reference/eden.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numba
import numpy as np
import torch

from hvd_adaptive.device import HOST
from hvd_adaptive.kernels import random
from hvd_adaptive.kernels.constants import NORM_LANES, SMALLEST_NORM
from hvd_adaptive.kernels.eden import APART, SPAN, Buckets, Levels, block_order, shared_streams
from hvd_adaptive.kernels.fixed import BLOCK, QUARTER
from hvd_adaptive.kernels.numba.decoder import load_chunk, pointer
from hvd_adaptive.kernels.numba.encoder import bucket_key, store_chunk
from hvd_adaptive.kernels.numba.hadamard import apply
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.scan import add_lanes, largest_bits, norm_of
from hvd_adaptive.kernels.packing import packing_of

# Up to so many levels are compared with in passes over vectors; more are searched.
_MOST_PASSES = 32
_COUNTER, _LOW = np.uint32(random.COUNTER), np.uint64(0xFFFFFFFF)
_MIX32_A, _MIX32_B = np.uint32(random.MIX32_A), np.uint32(random.MIX32_B)
_SMALLEST, _INFINITE = np.float32(SMALLEST_NORM), np.uint32(0x7F800000)
_SIGN = np.uint32(1 << 31)


def encode(
    flat: torch.Tensor,
    scales: torch.Tensor,
    words: torch.Tensor,
    bucket_size: int,
    levels: Levels,
    shared: int,
    own: int,
) -> None:
    """See reference.eden.encode."""
    buckets = Buckets(flat.numel(), bucket_size)
    _encoder(levels.bits)(
        flat.numpy(),
        scales.numpy(),
        words.numpy().view(np.uint32),
        bucket_size,
        buckets.last,
        levels.thresholds,
        levels.values,
        np.array([*shared_streams(shared, levels.bits), own], dtype=np.uint64),
        _factors(bucket_size, buckets.last, len(shared_streams(shared, levels.bits)) + 1),
    )


def decode_add(
    payloads: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bucket_size: int,
    levels: Levels,
    shared: int,
    owns: Sequence[int],
    out: torch.Tensor,
) -> None:
    """See reference.eden.decode_add."""
    buckets = Buckets(out.numel(), bucket_size)
    count = packing_of(1 << levels.bits).words(buckets.codes)
    for scales, words in payloads:
        if scales.numel() < buckets.count or words.numel() < count:
            raise ValueError(
                f"payload of {scales.numel()} buckets and {words.numel()} words is too short"
            )
    _decoder(levels.bits)(
        np.array([scales.data_ptr() for scales, _ in payloads], dtype=np.int64),
        np.array([words.data_ptr() for _, words in payloads], dtype=np.int64),
        count,
        bucket_size,
        buckets.last,
        levels.values,
        np.array(shared_streams(shared, levels.bits), dtype=np.uint64),
        np.array(owns, dtype=np.uint64),
        _factors(bucket_size, buckets.last, 1),
        out.numpy(),
    )


def warm(levels: Levels) -> None:
    """Compile the kernels of these levels into Numba's cache."""
    flat, size = torch.linspace(-1, 1, 600, **HOST), 64
    buckets = Buckets(flat.numel(), size)
    scales = torch.empty(buckets.count, **HOST)
    words = packing_of(1 << levels.bits).words(buckets.codes)
    packed = torch.empty(words, dtype=torch.int32, device="cpu")
    encode(flat, scales, packed, size, levels, 0, 1)
    decode_add([(scales, packed)], size, levels, 0, [1], torch.zeros(600, **HOST))


def _factors(size: int, last: int, rotations: int) -> np.ndarray:
    """Return a row for whole buckets, and one for the partial bucket.

    It holds m**-0.5, the weight of S after so many rotations without factors, and length**-0.5.
    """
    rows = []
    for length in (size, max(last, 1)):
        m = block_order(length)
        weight = float(length) ** (-rotations / 2) if m == length else 1.0
        rows.append((m**-0.5, weight, length**-0.5))
    return np.array(rows, dtype=np.float32)


@inline
def _flip(y, stream, bucket, hashes):
    """Give y the bucket's signs. hashes: uint32 (APART,)."""
    key = bucket_key(stream, bucket)
    low, high = np.uint32(key & _LOW), np.uint32(key >> np.uint64(32))
    bits = y.view(np.uint32)
    for begin in range(0, y.size, SPAN):
        first = np.uint32(begin // SPAN * APART)
        for lane in range(APART):
            h = np.uint32(np.uint32(np.uint32(first + np.uint32(lane)) * _COUNTER) + low)
            h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(16))) * _MIX32_A)
            h = np.uint32(h + high)
            hashes[lane] = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(13))) * _MIX32_B)
        span = bits[begin : min(y.size, begin + SPAN)]
        for row in range((span.size + APART - 1) // APART):
            part = span[row * APART : min(span.size, (row + 1) * APART)]
            shift = np.uint32(31 - row)
            for lane in range(part.size):
                part[lane] ^= np.uint32(np.uint32(hashes[lane] << shift) & _SIGN)


@inline
def _times(y, factor):
    for i in range(y.size):
        y[i] *= factor


@inline
def _rotate(y, root, columns, total):
    """See reference.eden._rotated."""
    m = 1
    while 2 * m <= y.size:
        m *= 2
    if m == y.size:
        apply(y, columns, total)
        return
    apply(y[:m], columns, total)
    _times(y[:m], root)
    apply(y[y.size - m :], columns, total)
    _times(y[y.size - m :], root)


@inline
def _rotate_back(y, root, columns, total):
    """See reference.eden._rotated_back."""
    m = 1
    while 2 * m <= y.size:
        m *= 2
    apply(y[y.size - m :], columns, total)
    _times(y[y.size - m :], root)
    if m != y.size:
        apply(y[:m], columns, total)
        _times(y[:m], root)


@inline
def _load(x, y, cell):
    """Set y to x times a power of two, then zeros; return the power.

    It is 0 if x is zero or below the normal range, NaN if x is not finite.
    """
    largest = largest_bits(x)
    if largest >= _INFINITE:
        return np.float32(np.nan)
    exponent = largest >> np.uint32(23)
    if exponent == 0:
        return np.float32(0)
    cell.view(np.uint32)[0] = np.uint32(np.uint32(255) - np.uint32(exponent)) << np.uint32(23)
    factor = cell[0]
    for i in range(x.size):
        y[i] = x[i] * factor
    for i in range(x.size, y.size):
        y[i] = np.float32(0)
    return factor


@inline
def _dot(y, v, acc):
    """Add y v to 32 lanes, in order."""
    for row in range(y.size // NORM_LANES):
        a = y[row * NORM_LANES : (row + 1) * NORM_LANES]
        b = v[row * NORM_LANES : (row + 1) * NORM_LANES]
        for lane in range(NORM_LANES):
            acc[lane] += a[lane] * b[lane]


@inline
def _searched(y, thresholds, bits, codes):
    for i in range(y.size):
        code = 0
        step = 1 << (bits - 1)
        while step:
            code += step if y[i] >= thresholds[code + step - 1] else 0
            step //= 2
        codes[i] = np.uint32(code)


@inline
def _select(y, deviation, thresholds, values, codes, v):
    """Set codes and their levels v, by a pass for each threshold."""
    for i in range(y.size):
        codes[i], v[i] = np.uint32(0), values[0]
    for t in range(thresholds.size):
        threshold, code, value = thresholds[t] * deviation, np.uint32(t + 1), values[t + 1]
        for i in range(y.size):
            above = y[i] >= threshold
            codes[i] = code if above else codes[i]
            v[i] = value if above else v[i]


@functools.cache
def _encoder(bits: int):
    alphabet = 1 << bits

    @jit
    def encode(x, scales, words, size, last, thresholds, values, streams, factors):
        room = max(size, BLOCK)
        codes, rows = np.zeros(room, np.uint32), np.empty(QUARTER, np.uint32)
        memory, v = np.empty(max(size, last), np.float32), np.empty(BLOCK, np.float32)
        acc, cell = np.empty(NORM_LANES, np.float32), np.empty(1, np.float32)
        hashes, scaled = np.empty(APART, np.uint32), np.empty(alphabet - 1, np.float32)
        columns, total = np.ones((1, 16), np.float32), np.empty(16, np.float32)
        filled, index = 0, 0
        for b in range(scales.size):
            own_x = x[b * size : min(x.size, (b + 1) * size)]
            kind = 0 if own_x.size == size else 1
            length = size if kind == 0 else last
            y, part = memory[:length], codes[filled : filled + length]
            factor = _load(own_x, y, cell)
            scale = factor
            if factor > 0:
                root = factors[kind, 0]
                for stream in streams:
                    _flip(y, stream, b, hashes)
                    _rotate(y, root, columns, total)
                norm = norm_of(y, False, acc, cell)
                deviation = norm * factors[kind, 2]
                acc[:] = np.float32(0)
                if alphabet > _MOST_PASSES:
                    for t in range(alphabet - 1):
                        scaled[t] = thresholds[t] * deviation
                for begin in range(0, length, BLOCK):
                    end = min(length, begin + BLOCK)
                    run, some = y[begin:end], part[begin:end]
                    if alphabet <= _MOST_PASSES:
                        _select(run, deviation, thresholds, values, some, v)
                    else:
                        _searched(run, scaled, bits, some)
                        for i in range(run.size):
                            v[i] = values[np.int64(some[i])]
                    _dot(run, v, acc)
                scale = norm * norm / add_lanes(acc) * factors[kind, 1] / factor
                if scale < _SMALLEST:
                    scale = np.float32(0)
                elif not np.isfinite(scale):
                    scale = np.float32(np.nan)
            if not scale > 0:
                for i in range(length):
                    part[i] = np.uint32(0)
            scales[b] = scale
            filled += length
            if filled >= room or b == scales.size - 1:
                for begin in range(0, filled, BLOCK):
                    rest = min(BLOCK, filled - begin)
                    store_chunk(codes[begin:], index, rest, BLOCK, alphabet, 1, bits, rows, words)
                    index += 1
                filled = 0

    return encode


@inline
def _take(part, scale, alphabet, values, y):
    """Set y to the codes' levels times scale."""
    if alphabet <= _MOST_PASSES // 2:
        first = values[0] * scale
        for i in range(y.size):
            y[i] = first
        for t in range(1, alphabet):
            code, value = np.uint32(t), values[t] * scale
            for i in range(y.size):
                y[i] = value if part[i] == code else y[i]
    else:
        for i in range(y.size):
            y[i] = values[np.int64(part[i])] * scale


@functools.cache
def _decoder(bits: int):
    alphabet = 1 << bits

    @jit
    def decode(scale_at, word_at, count, size, last, values, shared, owns, factors, out):
        room = max(size, BLOCK)
        codes, rows = np.empty(room, np.uint32), np.empty(QUARTER, np.uint32)
        memory, hashes = np.empty(room, np.float32), np.empty(APART, np.uint32)
        sums = np.empty(room, np.float32)
        columns, total = np.ones((1, 16), np.float32), np.empty(16, np.float32)
        buckets = (out.size + size - 1) // size
        each = room // size
        for first in range(0, buckets, each):
            stop = min(buckets, first + each)
            filled = (stop - first) * size
            if stop == buckets and last:
                filled += last - size
            for i in range(filled):
                sums[i] = np.float32(0)
            for rank in range(word_at.size):
                scales = numba.carray(pointer(scale_at[rank]), buckets, np.float32)
                words = numba.carray(pointer(word_at[rank]), count, np.uint32)
                index = first * size // BLOCK
                for begin in range(0, filled, BLOCK):
                    rest = min(BLOCK, filled - begin)
                    load_chunk(
                        words,
                        index + begin // BLOCK,
                        rest,
                        BLOCK,
                        alphabet,
                        1,
                        bits,
                        rows,
                        codes[begin:],
                    )
                for b in range(first, stop):
                    scale = scales[b]
                    if scale == 0:
                        continue
                    at = (b - first) * size
                    kind = 0 if filled - at >= size else 1
                    length = size if kind == 0 else last
                    y, part, target = memory[:length], codes[at:], sums[at : at + length]
                    _take(part, scale, alphabet, values, y)
                    _rotate_back(y, factors[kind, 0], columns, total)
                    _flip(y, owns[rank], b, hashes)
                    for i in range(length):
                        target[i] += y[i]
            for b in range(first, stop):
                used = False
                for rank in range(word_at.size):
                    scales = numba.carray(pointer(scale_at[rank]), buckets, np.float32)
                    used |= scales[b] != 0
                if not used:
                    continue
                at = (b - first) * size
                kind = 0 if filled - at >= size else 1
                y = sums[at : at + (size if kind == 0 else last)]
                for stream in shared[::-1]:
                    _rotate_back(y, factors[kind, 0], columns, total)
                    _flip(y, stream, b, hashes)
                target = out[b * size : min(out.size, (b + 1) * size)]
                for i in range(target.size):
                    target[i] += y[i]

    return decode
