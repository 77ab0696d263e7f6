"""Unpack codes, look levels up, rotate back and add (EDEN) in Numba."""

from __future__ import annotations

import functools

import numba
import numpy as np

from hvd_adaptive.kernels.eden import APART
from hvd_adaptive.kernels.fixed import BLOCK, LANES, QUARTER
from hvd_adaptive.kernels.numba.decoder import add_small, load_fixed, pick4, pointer
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.rotation import (
    add_rotated_back,
    aligned,
    flip,
    rotate_back,
    times,
)
from hvd_adaptive.kernels.numba.take import MOST_BITS, take_block

_ONE = np.float32(1)


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
            y[i] = values[np.uint64(part[i])] * scale


@functools.cache
def decoder_of(bits: int):
    alphabet = 1 << bits

    @jit
    def decode(scale_at, word_at, count, size, last, kept, values, shared, owns, factors, out):
        codes, rows = np.empty(max(kept[0], BLOCK), np.uint32), np.empty(QUARTER, np.uint32)
        buckets = (out.size + size - 1) // size
        each = codes.size // kept[0]
        memory, hashes = aligned(size), np.empty(APART, np.uint32)
        sums, padded = aligned(each * size), np.empty(max(alphabet, 16), np.float32)
        for i in range(padded.size):
            padded[i] = values[i % alphabet]
        direct = bits <= MOST_BITS and kept[0] >= BLOCK
        columns, total = np.ones((1, 16), np.float32), np.empty(16, np.float32)
        for first in range(0, buckets, each):
            stop = min(buckets, first + each)
            filled, rotated = (stop - first) * kept[0], (stop - first) * size
            if stop == buckets and last:
                filled, rotated = filled + kept[1] - kept[0], rotated + last - size
            for i in range(rotated):
                sums[i] = np.float32(0)
            for rank in range(word_at.size):
                scales = numba.carray(pointer(scale_at[rank]), buckets, np.float32)
                words = numba.carray(pointer(word_at[rank]), count, np.uint32)
                index = first * kept[0] // BLOCK
                if not direct or rotated < size:
                    for begin in range(0, filled, BLOCK):
                        rest = min(BLOCK, filled - begin)
                        load_fixed(words, index + begin // BLOCK, rest, bits, rows, codes[begin:])
                for b in range(first, stop):
                    scale = scales[b]
                    if scale == 0:
                        continue
                    at = (b - first) * size
                    kind = 0 if rotated - at >= size else 1
                    length = size if kind == 0 else last
                    y, part = memory[:length], codes[(b - first) * kept[0] :]
                    target = sums[at : at + length]
                    weight, root = scale * factors[kind, 1], factors[kind, 0]
                    if direct and length == size:
                        for begin in range(0, kept[0], BLOCK):
                            packed = words[(b * kept[0] + begin) // BLOCK * bits * LANES :]
                            take_block(packed, padded, weight, y, begin, numba.literally(bits))
                    else:
                        _take(part, weight, alphabet, padded, y[: kept[kind]])
                    for i in range(kept[kind], length):
                        y[i] = np.float32(0)
                    add_rotated_back(y, root, columns, total, owns[rank], b, _ONE, hashes, target)
            for b in range(first, stop):
                used = False
                for rank in range(word_at.size):
                    scales = numba.carray(pointer(scale_at[rank]), buckets, np.float32)
                    used |= scales[b] != 0
                if not used:
                    continue
                at = (b - first) * size
                kind = 0 if rotated - at >= size else 1
                y = sums[at : at + (size if kind == 0 else last)]
                target = out[b * size : min(out.size, (b + 1) * size)]
                _add_unshared(y, shared, b, factors[kind], columns, total, hashes, target)

    return decode


@inline
def _add_unshared(y, shared, b, factors, columns, total, hashes, target):
    """Undo the shared rotations of bucket b's sum y, and add it to target."""
    for again in range(shared.size - 1, 0, -1):
        rotate_back(y, factors[0], columns, total)
        flip(y, shared[again], b, hashes)
        times(y, factors[1])
    add_rotated_back(y, factors[0], columns, total, shared[0], b, factors[1], hashes, target)
