"""Rotate, quantise and pack (EDEN) in Numba, bucket by bucket in the L1 cache, and invert it."""

from __future__ import annotations

import functools

import numba
import numpy as np

from hvd_adaptive.kernels.constants import NORM_LANES, SMALLEST_NORM
from hvd_adaptive.kernels.eden import APART, Buckets, Levels, shared_streams
from hvd_adaptive.kernels.numba.codes import store_block, store_tail
from hvd_adaptive.kernels.numba.decoder import addresses
from hvd_adaptive.kernels.numba.eden_decoder import decoder_of
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.rotation import aligned, factors_of, rotate
from hvd_adaptive.kernels.numba.scan import add_lanes, largest_bits, norm_of
from hvd_adaptive.kernels.packing import BLOCK, LANES, packing_of

_SMALLEST, _INFINITE = np.float32(SMALLEST_NORM), np.uint32(0x7F800000)
_NEVER = np.float32(np.inf)


def encode(flat, scales, words, bucket_size, levels, shared, own):
    last = Buckets(flat.numel(), bucket_size).last
    streams = [*shared_streams(shared, levels.bits), own]
    encoder_of(levels.bits)(
        flat.numpy(),
        scales.numpy(),
        words.numpy().view(np.uint32),
        bucket_size,
        last,
        (levels.kept(bucket_size), levels.kept(last)),
        *_positive(levels),
        np.array(streams, dtype=np.uint64),
        factors_of(bucket_size, last, len(streams)),
    )


@functools.lru_cache(maxsize=64)
def _positive(levels: Levels) -> tuple[np.ndarray, np.ndarray]:
    """Return positive thresholds, then infinity, and positive levels, then 0: float32 (>= 8,)."""
    count = 1 << (levels.bits - 1)
    thresholds = np.full(max(8, count), np.inf, dtype=np.float32)
    sizes = np.zeros(max(8, count), dtype=np.float32)
    thresholds[: count - 1], sizes[:count] = levels.thresholds[count:], levels.values[count:]
    return thresholds, sizes


def decode_add(payloads, bucket_size, levels, shared, owns, out):
    buckets = Buckets(out.numel(), bucket_size)
    count = packing_of(1 << levels.bits).words(levels.codes(buckets.codes, bucket_size))
    decoder_of(levels.bits)(
        *addresses(payloads, "buckets", buckets.count, count),
        bucket_size,
        buckets.last,
        (levels.kept(bucket_size), levels.kept(buckets.last)),
        levels.values,
        np.array(shared_streams(shared, levels.bits), dtype=np.uint64),
        np.array(owns, dtype=np.uint64),
        factors_of(bucket_size, buckets.last, 1),
        out.numpy(),
    )


@inline
def _load(x, y):
    """Set y to x times a power of two, then zeros; return the power.

    It is 0 if x is zero or below the normal range, NaN if x is not finite.
    """
    largest = largest_bits(x)
    if largest >= _INFINITE:
        return np.float32(np.nan)
    exponent = np.uint32(largest >> np.uint32(23))
    if exponent == 0:
        return np.float32(0)
    factor = np.uint32(np.uint32(np.uint32(255) - exponent) << np.uint32(23)).view(np.float32)
    for i in range(x.size):
        y[i] = x[i] * factor
    for i in range(x.size, y.size):
        y[i] = np.float32(0)
    return factor


@inline
def _pick(y, half, t, v):
    """Return the code of y, and the size of its level: ``half`` is a constant of at most 8."""
    size, m, level = np.abs(y), np.uint32(0), v[0]
    for k in range(1, half):
        m, level = (np.uint32(k), v[k]) if size >= t[k - 1] else (m, level)
    code = np.uint32(np.uint32(half - 1) - m) if y < 0 else np.uint32(np.uint32(half) + m)
    return code, size * level


@inline
def _round(y, half, a, b, codes, acc):
    """Set the codes of y; add sizes times levels b to 32 lanes, in order. a: thresholds, then
    infinity.
    """
    t = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    v = b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]
    for row in range(0, y.size, 2 * NORM_LANES):
        part, out = y[row : row + 2 * NORM_LANES], codes[row : row + 2 * NORM_LANES]
        for i in range(NORM_LANES):
            c, p = _pick(part[i], half, t, v)
            d, q = _pick(part[i + NORM_LANES], half, t, v)
            out[i], out[i + NORM_LANES] = c, d
            acc[i] = (acc[i] + p) + q


@inline
def _search(y, half, t, v, codes, acc):
    """Do as ``_round`` for any ``half``, a power of two, by bisection: a loop over y at each step,
    which LLVM vectorises.
    """
    for i in range(y.size):
        codes[i] = np.uint32(0)
    step = np.uint32(half // 2)
    while step:
        for i in range(y.size):
            m = codes[i]
            above = np.abs(y[i]) >= t[np.uint64(np.uint32(m + step) - np.uint32(1))]
            codes[i] = np.uint32(m + step) if above else m
        step = np.uint32(step >> np.uint32(1))
    for row in range(0, y.size, NORM_LANES):
        part, out = y[row : row + NORM_LANES], codes[row : row + NORM_LANES]
        for i in range(NORM_LANES):
            m = out[i]
            acc[i] += np.abs(part[i]) * v[np.uint64(m)]
            out[i] = np.uint32(np.uint32(half - 1) - m) if part[i] < 0 else np.uint32(half + m)


@functools.cache
def encoder_of(bits: int):
    """Return the encoder of all buckets; the number of bits is a constant of the compiled code.

    thresholds, sizes: the positive ones, at least eight.
    """
    half = 1 << (bits - 1)

    @jit
    def encode(x, scales, words, size, last, kept, thresholds, sizes, streams, factors):
        buckets = (x.size + size - 1) // size
        room, filled, word = max(kept[0], BLOCK), 0, 0
        codes, units = np.zeros(room, np.uint32), np.empty(LANES, np.uint32)
        memory = aligned(max(size, last))
        acc, hashes = np.empty(NORM_LANES, np.float32), np.empty(APART, np.uint32)
        scaled = np.empty(sizes.size, np.float32)
        scaled[:] = _NEVER
        for b in range(buckets):
            own_x = x[b * size : min(x.size, (b + 1) * size)]
            kind = 0 if own_x.size == size else 1
            length = size if kind == 0 else last
            y, part = memory[:length], codes[filled : filled + kept[kind]]
            factor = _load(own_x, y)
            scale = factor
            if factor > 0:
                root = factors[kind, 0]
                for stream in streams:
                    rotate(y, root, stream, b, hashes, False)
                norm = norm_of(y, False, acc)
                deviation = norm * factors[kind, 2]
                for t in range(half - 1):
                    scaled[t] = thresholds[t] * deviation
                acc[:] = np.float32(0)
                if half <= 8:
                    _round(y[: part.size], half, scaled, sizes, part, acc)
                else:
                    _search(y[: part.size], half, scaled, sizes, part, acc)
                scale = norm * norm / add_lanes(acc) * factors[kind, 1] / factor
                if scale < _SMALLEST:
                    scale = np.float32(0)
                elif not np.isfinite(scale):
                    scale = np.float32(np.nan)
            if not scale > 0:
                for i in range(part.size):
                    part[i] = np.uint32(0)
            scales[b] = scale
            filled += part.size
            if filled >= room or b == buckets - 1:
                for begin in range(0, filled, BLOCK):
                    rest = min(BLOCK, filled - begin)
                    if rest < BLOCK:
                        word += store_tail(codes[begin:], rest, bits, units, words[word:])
                    else:
                        store_block(codes[begin:], words[word:], numba.literally(bits))
                        word += bits * LANES
                filled = 0

    return encode
