"""Unpack codes, look levels up, rotate back and add (EDEN) in Numba."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from hvd_adaptive.kernels.eden import APART
from hvd_adaptive.kernels.numba.codes import load_fixed
from hvd_adaptive.kernels.numba.decoder import pointer
from hvd_adaptive.kernels.numba.jit import jit
from hvd_adaptive.kernels.numba.lanes import FLOATS, INTS, LONG, Lanes, emitted
from hvd_adaptive.kernels.numba.permute import add_values, entries_of
from hvd_adaptive.kernels.numba.rotation import add_rotated_back, aligned, rotate, times
from hvd_adaptive.kernels.packing import BLOCK, LANES, QUARTER, QUARTERS, ROWS

MOST_BITS = 4  # of codes whose 16 levels fill one register
_ZERO, _ONE = np.float32(0), np.float32(1)


@intrinsic(prefer_literal=True)
def take_block(typingctx, words, values, scale, y, begin, bits):
    """Set y[begin:][:512] to scale times the levels of 512 packed codes (kernels/packing.py).

    values: 16 levels; level c is also at every c + k 2**bits. bits: a constant, 1 to 4.
    """
    count = bits.literal_value
    signature = types.void(words, values, types.float32, y, types.intp, bits)

    def emit(lanes, args, source, levels, target):
        factor = lanes.spread(args[2])
        table = lanes.builder.fmul(lanes.load(levels.data, LONG(0), FLOATS), factor)
        held = lanes.registers(table)[: lanes.registers_of(1 << count)]
        for place, shift, value in _rows(lanes, source.data, count):
            level = lanes.look_up(held, lanes.shifted(value, -shift))
            lanes.store(level, target.data, lanes.builder.add(args[4], LONG(place)))

    return emitted(signature, emit, 0, 1, 3)


def _rows(lanes: Lanes, source: ir.Value, bits: int) -> Iterator[tuple[int, int, ir.Value]]:
    """Yield (place, shift, value): 16 codes of a block, at bit ``shift`` of each lane of value."""
    width, builder = QUARTERS * bits, lanes.builder
    packed = [lanes.load(source, LONG(word * LANES), INTS) for word in range(bits)]
    for row in range(ROWS):
        for quarter in range(QUARTERS):
            word, shift = divmod(row * width + quarter * bits, 32)
            value = packed[word]
            if shift + bits > 32:
                low = lanes.shifted(value, -shift)
                value, shift = builder.or_(low, lanes.shifted(packed[word + 1], 32 - shift)), 0
            yield quarter * QUARTER + row * LANES, shift, value


@functools.cache
def decoder_of(bits: int):
    alphabet = 1 << bits
    held = entries_of(alphabet) if bits <= MOST_BITS else 0

    @jit
    def decode(scale_at, word_at, count, size, last, kept, values, shared, owns, factors, out):
        codes = np.empty(max(kept[0], BLOCK), np.uint32)
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
                        load_fixed(words, index + begin // BLOCK, rest, bits, codes[begin:])
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
                        else:
                            coded = y[: kept[kind]]
                            for i in range(coded.size):
                                coded[i] = _ZERO if held else padded[np.uint64(part[i])] * scale
                            if held:
                                add_values(part, scale, padded, coded, held)
                        for i in range(kept[kind], length):
                            y[i] = np.float32(0)
                    root = factors[kind, 0]
                    for again in range(streams.size - 1, 0, -1):
                        rotate(y, root, streams[again], b, hashes, True)
                        times(y, weight)
                    add_rotated_back(y, root, streams[0], b, weight, hashes, target)

    return decode
