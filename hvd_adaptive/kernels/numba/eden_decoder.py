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
    rotate,
    times,
)
from hvd_adaptive.kernels.numba.take import MOST_BITS, take_block

_ONE = np.float32(1)


@inline
def _take2(part, scale, alphabet, values, y):
    """Set y to the codes' levels times scale."""
    t0, t1 = values[0] * scale, values[1] * scale
    for i in range(y.size):
        y[i] = t1 if part[i] != 0 else t0


@inline
def _take4(part, scale, alphabet, values, y):
    t0, t1, t2, t3 = values[0] * scale, values[1] * scale, values[2] * scale, values[3] * scale
    for i in range(y.size):
        y[i] = pick4(part[i], t0, t1, t2, t3)


@inline
def _take16(part, scale, alphabet, values, y):
    y[:] = np.float32(0)
    add_small(part, scale, alphabet, values, y)


@inline
def _take_any(part, scale, alphabet, values, y):
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
        used = np.empty(each, np.bool_)
        direct = bits <= MOST_BITS and kept[0] >= BLOCK
        for first in range(0, buckets, each):
            stop = min(buckets, first + each)
            filled, rotated = (stop - first) * kept[0], (stop - first) * size
            if stop == buckets and last:
                filled, rotated = filled + kept[1] - kept[0], rotated + last - size
            for i in range(rotated):
                sums[i] = np.float32(0)
            used[:] = False
            for turn in range(word_at.size + 1):
                # The last turn undoes the shared rotations of the sums of all ranks.
                shares = turn == word_at.size
                rank = 0 if shares else turn
                streams = shared if shares else owns[rank : rank + 1]
                scales = numba.carray(pointer(scale_at[rank]), buckets, np.float32)
                words = numba.carray(pointer(word_at[rank]), count, np.uint32)
                if not shares and (not direct or rotated < size):
                    index = first * kept[0] // BLOCK
                    for begin in range(0, filled, BLOCK):
                        rest = min(BLOCK, filled - begin)
                        load_fixed(words, index + begin // BLOCK, rest, bits, rows, codes[begin:])
                for b in range(first, stop):
                    at = (b - first) * size
                    kind = 0 if rotated - at >= size else 1
                    length = size if kind == 0 else last
                    y, target, weight = memory[:length], sums[at : at + length], _ONE
                    if shares:
                        if not used[b - first]:
                            continue
                        y, weight = target, factors[kind, 1]
                        target = out[b * size : min(out.size, (b + 1) * size)]
                    else:
                        if scales[b] == 0:
                            continue
                        used[b - first] = True
                        scale, part = scales[b] * factors[kind, 1], codes[(b - first) * kept[0] :]
                        if direct and length == size:
                            for begin in range(0, kept[0], BLOCK):
                                packed = words[(b * kept[0] + begin) // BLOCK * bits * LANES :]
                                take_block(packed, padded, scale, y, begin, numba.literally(bits))
                        # Numba leaves branches of other bits out. A helper chosen outside would
                        # be another object in each process: the kernel would not be cached.
                        elif bits == 1:
                            _take2(part, scale, alphabet, padded, y[: kept[kind]])
                        elif bits == 2:
                            _take4(part, scale, alphabet, padded, y[: kept[kind]])
                        elif bits <= 4:
                            _take16(part, scale, alphabet, padded, y[: kept[kind]])
                        else:
                            _take_any(part, scale, alphabet, padded, y[: kept[kind]])
                        for i in range(kept[kind], length):
                            y[i] = np.float32(0)
                    root = factors[kind, 0]
                    for again in range(streams.size - 1, 0, -1):
                        rotate(y, root, True)
                        flip(y, streams[again], b, hashes)
                        times(y, weight)
                    add_rotated_back(y, root, streams[0], b, weight, hashes, target)

    return decode
