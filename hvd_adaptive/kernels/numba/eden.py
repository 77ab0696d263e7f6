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
from hvd_adaptive.kernels.fixed import BLOCK, LANES, QUARTER
from hvd_adaptive.kernels.numba.butterflies import RUN, add_last_butterflies
from hvd_adaptive.kernels.numba.decoder import add_small, load_fixed, pick4, pointer
from hvd_adaptive.kernels.numba.encoder import bucket_key, store_fixed
from hvd_adaptive.kernels.numba.hadamard import apply, long_strides
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.scan import add_lanes, largest_bits, norm_of
from hvd_adaptive.kernels.numba.take import MOST_BITS, take_block
from hvd_adaptive.kernels.packing import packing_of

# Up to so many sizes of levels are selected in vector registers; more are searched.
_MOST_PICKED = 8
_COUNTER, _LOW = np.uint32(random.COUNTER), np.uint64(0xFFFFFFFF)
_MIX32_A, _MIX32_B = np.uint32(random.MIX32_A), np.uint32(random.MIX32_B)
_SMALLEST, _INFINITE = np.float32(SMALLEST_NORM), np.uint32(0x7F800000)
_SIGN, _ONE = np.uint32(1 << 31), np.float32(1)
_LINE = 64  # bytes of a cache line, and of a vector register


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
def aligned(count):
    """Return uninitialised float32 (count,) that begins with a cache line."""
    memory = np.empty(count + _LINE // 4, np.float32)
    skip = -memory.ctypes.data % _LINE // 4
    return memory[skip : skip + count]


@inline
def _hash(stream, bucket, begin, hashes):
    """Set hashes (uint32 (APART,)) to those of a bucket's coordinates from ``begin`` on."""
    key = bucket_key(stream, bucket)
    low, high = np.uint32(key & _LOW), np.uint32(key >> np.uint64(32))
    first = np.uint32(begin // SPAN * APART)
    for lane in range(APART):
        h = np.uint32(np.uint32(np.uint32(first + np.uint32(lane)) * _COUNTER) + low)
        h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(16))) * _MIX32_A)
        h = np.uint32(h + high)
        hashes[lane] = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(13))) * _MIX32_B)


@inline
def _flip(y, stream, bucket, hashes):
    """Give y the bucket's signs. hashes: uint32 (APART,)."""
    bits = y.view(np.uint32)
    for begin in range(0, y.size, SPAN):
        _hash(stream, bucket, begin, hashes)
        span = bits[begin : min(y.size, begin + SPAN)]
        for row in range((span.size + APART - 1) // APART):
            part = span[row * APART : min(span.size, (row + 1) * APART)]
            shift = np.uint32(31 - row)
            for lane in range(part.size):
                part[lane] ^= np.uint32(np.uint32(hashes[lane] << shift) & _SIGN)


@inline
def _add_rotated_back(y, root, columns, total, stream, bucket, factor, hashes, target):
    """Undo a rotation of y, and add y times factor to target, which may be shorter."""
    if y.size < RUN or y.size & (y.size - 1) or target.size < y.size:
        _rotate_back(y, root, columns, total)
        _flip(y, stream, bucket, hashes)
        _add(y, factor, target)
        return
    long_strides(y)
    for begin in range(0, y.size, SPAN):
        _hash(stream, bucket, begin, hashes)
        for at in range(begin, min(y.size, begin + SPAN), RUN):
            shift = np.uint32(31 - (at - begin) // APART)
            add_last_butterflies(y, at, hashes, at % APART, shift, factor, target)


@jit
def _add(y, factor, target):
    # A function of its own: LLVM does not vectorise the loop inside of the decoder.
    for i in range(target.size):
        target[i] += y[i] * factor


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
    if m != y.size:
        _times(y[y.size - m :], root)
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
def _pick(y, half, t1, t2, t3, t4, t5, t6, t7, v0, v1, v2, v3, v4, v5, v6, v7):
    """Return the code of y, and the size of its level: ``half`` is a constant of at most 8."""
    size = np.abs(y)
    m, v = np.uint32(0), v0
    if half >= 2:
        m, v = (np.uint32(1), v1) if size >= t1 else (m, v)
    if half >= 4:
        m, v = (np.uint32(2), v2) if size >= t2 else (m, v)
        m, v = (np.uint32(3), v3) if size >= t3 else (m, v)
    if half >= 8:
        m, v = (np.uint32(4), v4) if size >= t4 else (m, v)
        m, v = (np.uint32(5), v5) if size >= t5 else (m, v)
        m, v = (np.uint32(6), v6) if size >= t6 else (m, v)
        m, v = (np.uint32(7), v7) if size >= t7 else (m, v)
    code = np.uint32(np.uint32(half - 1) - m) if y < 0 else np.uint32(np.uint32(half) + m)
    return code, size * v


@inline
def _round(y, half, t, v, codes, acc):
    """Set the codes of y; add sizes times levels to 32 lanes, in order. t: ends with infinity."""
    t1, t2, t3, t4, t5, t6, t7 = t[0], t[1], t[2], t[3], t[4], t[5], t[6]
    v0, v1, v2, v3, v4, v5, v6, v7 = v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]
    for row in range(0, y.size, 2 * NORM_LANES):
        part, out = y[row : row + 2 * NORM_LANES], codes[row : row + 2 * NORM_LANES]
        for i in range(NORM_LANES):
            c, p = _pick(part[i], half, t1, t2, t3, t4, t5, t6, t7, v0, v1, v2, v3, v4, v5, v6, v7)
            d, q = _pick(
                part[i + NORM_LANES],
                half,
                t1,
                t2,
                t3,
                t4,
                t5,
                t6,
                t7,
                v0,
                v1,
                v2,
                v3,
                v4,
                v5,
                v6,
                v7,
            )
            out[i] = c
            out[i + NORM_LANES] = d
            acc[i] = (acc[i] + p) + q


@inline
def _search(y, half, t, v, codes, acc):
    """Do as ``_round`` for any ``half``, a power of two, by bisection."""
    for i in range(y.size):
        size, m, step = np.abs(y[i]), 0, half // 2
        while step:
            m += step if size >= t[m + step - 1] else 0
            step //= 2
        codes[i] = np.uint32(half - 1 - m) if y[i] < 0 else np.uint32(half + m)
        acc[i % NORM_LANES] += size * v[m]


@functools.cache
def _encoder(bits: int):
    half = 1 << (bits - 1)

    @jit
    def encode(x, scales, words, size, last, thresholds, values, streams, factors):
        room = max(size, BLOCK)
        codes, rows = np.zeros(room, np.uint32), np.empty(QUARTER, np.uint32)
        memory = aligned(max(size, last))
        acc, cell = np.empty(NORM_LANES, np.float32), np.empty(1, np.float32)
        hashes, sizes = np.empty(APART, np.uint32), np.zeros(max(half, _MOST_PICKED), np.float32)
        scaled = np.full(sizes.size, np.float32(np.inf))
        sizes[:half] = values[half:]
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
                for t in range(half - 1):
                    scaled[t] = thresholds[half + t] * deviation
                acc[:] = np.float32(0)
                if half <= _MOST_PICKED:
                    _round(y, half, scaled, sizes, part, acc)
                else:
                    _search(y, half, scaled, sizes, part, acc)
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
                    store_fixed(codes[begin:], index, rest, bits, rows, words)
                    index += 1
                filled = 0

    return encode


@inline
def _take(part, scale, alphabet, values, y):
    """Set y to the codes' levels times scale, selected from registers if they are few."""
    if alphabet == 2:
        t0, t1 = values[0] * scale, values[1] * scale
        for i in range(y.size):
            y[i] = t1 if part[i] != 0 else t0
    elif alphabet == 4:
        t0, t1 = values[0] * scale, values[1] * scale
        t2, t3 = values[2] * scale, values[3] * scale
        for i in range(y.size):
            y[i] = pick4(part[i], t0, t1, t2, t3)
    elif alphabet <= 16:
        y[:] = np.float32(0)
        add_small(part, scale, alphabet, values, y)
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
        memory, hashes = aligned(room), np.empty(APART, np.uint32)
        sums, padded = aligned(room), np.empty(max(alphabet, 16), np.float32)
        for i in range(padded.size):
            padded[i] = values[i % alphabet]
        direct = bits <= MOST_BITS and size >= BLOCK
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
                if not direct or filled < size:
                    for begin in range(0, filled, BLOCK):
                        rest = min(BLOCK, filled - begin)
                        load_fixed(words, index + begin // BLOCK, rest, bits, rows, codes[begin:])
                for b in range(first, stop):
                    scale = scales[b]
                    if scale == 0:
                        continue
                    at = (b - first) * size
                    kind = 0 if filled - at >= size else 1
                    length = size if kind == 0 else last
                    y, part, target = memory[:length], codes[at:], sums[at : at + length]
                    weight, root = scale * factors[kind, 1], factors[kind, 0]
                    if direct and length == size:
                        for begin in range(0, size, BLOCK):
                            packed = words[(b * size + begin) // BLOCK * bits * LANES :]
                            take_block(packed, padded, weight, y, begin, numba.literally(bits))
                    else:
                        _take(part, weight, alphabet, padded, y)
                    _add_rotated_back(y, root, columns, total, owns[rank], b, _ONE, hashes, target)
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
                for again in range(shared.size - 1, 0, -1):
                    _rotate_back(y, factors[kind, 0], columns, total)
                    _flip(y, shared[again], b, hashes)
                    _times(y, factors[kind, 1])
                root, weight = factors[kind, 0], factors[kind, 1]
                target = out[b * size : min(out.size, (b + 1) * size)]
                _add_rotated_back(y, root, columns, total, shared[0], b, weight, hashes, target)

    return decode
