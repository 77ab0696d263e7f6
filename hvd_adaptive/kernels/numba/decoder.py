"""Unpack, look up, scale and add over all ranks' payloads in Numba, block by block."""

from __future__ import annotations

import numba
import numpy as np

from hvd_adaptive.kernels.numba.codes import chunk_size, load_fixed, load_units
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.permute import add_permuted
from hvd_adaptive.kernels.packing import Packing

_ONE = np.float32(1)


@inline
def pick4(c, t0, t1, t2, t3):
    """Return t[c & 3], by selections on the code's bits: faster than a gather."""
    odd = (c & np.uint32(1)) != 0
    low = t1 if odd else t0
    high = t3 if odd else t2
    return high if (c & np.uint32(2)) != 0 else low


@inline
def _pick8(c, t0, t1, t2, t3, t4, t5, t6, t7):
    low, high = pick4(c, t0, t1, t2, t3), pick4(c, t4, t5, t6, t7)
    return high if (c & np.uint32(4)) != 0 else low


@inline
def _add_uniform(part, scale, alphabet, step, target):
    """Add values by the same products as in tables.kernel_table."""
    last = np.int32(alphabet - 1)
    for j in range(target.size):
        k = np.int32(np.int32(np.int32(part[j]) * np.int32(2)) - last)
        target[j] += np.float32(np.float32(k) * step) * scale


@inline
def add_small(part, scale, alphabet, values, target):
    """Add up to 16 values, selected from registers."""
    t0, t1, t2, t3 = values[0] * scale, values[1] * scale, values[2] * scale, values[3] * scale
    t4, t5, t6, t7 = values[4] * scale, values[5] * scale, values[6] * scale, values[7] * scale
    t8, t9 = values[8] * scale, values[9] * scale
    t10, t11 = values[10] * scale, values[11] * scale
    t12, t13 = values[12] * scale, values[13] * scale
    t14, t15 = values[14] * scale, values[15] * scale
    for j in range(target.size):
        c = part[j]
        if alphabet <= 4:
            target[j] += pick4(c, t0, t1, t2, t3)
        elif alphabet <= 8:
            target[j] += _pick8(c, t0, t1, t2, t3, t4, t5, t6, t7)
        else:
            low = _pick8(c, t0, t1, t2, t3, t4, t5, t6, t7)
            high = _pick8(c, t8, t9, t10, t11, t12, t13, t14, t15)
            target[j] += high if (c & np.uint32(8)) != 0 else low


@inline
def add_looked_up(part, scale, values, target):
    for j in range(target.size):
        target[j] += values[np.uint64(part[j])] * scale


@inline
def scale_by(factor, target):
    for j in range(target.size):
        target[j] *= factor


def make_decoder(own: bool, uniform: bool, entries: int, packing: Packing):
    """Make the decoder for one packing, which is a constant of the compiled code.

    own: buckets have levels of their own, ``room`` numbers each, else a scale. entries: size of the
    table that registers hold, see permute.py; 0 for look-ups in memory.
    """
    chunk = chunk_size(packing)
    alphabet, digits, width = packing
    step = np.float32(1 / (alphabet - 1))

    @jit
    def decode_add(number_at, word_at, size, bucket_size, room, shared, factor, add, out):
        codes = np.empty(chunk, np.uint32)
        n = out.size
        buckets = (n + bucket_size - 1) // bucket_size
        for index in range((n + chunk - 1) // chunk):
            begin = index * chunk
            end = min(n, begin + chunk)
            if not add:
                out[begin:end] = np.float32(0)
            for rank in range(word_at.size):
                numbers = numba.carray(pointer(number_at[rank]), buckets * room, np.float32)
                words = numba.carray(pointer(word_at[rank]), size, np.uint32)
                rest = end - begin
                if digits > 1:
                    load_units(words, index, rest, chunk, alphabet, digits, width, codes)
                else:
                    load_fixed(words, index, rest, width, codes)
                i = begin
                while i < end:
                    bucket = i // bucket_size
                    stop = min(end, (bucket + 1) * bucket_size)
                    if own:
                        scale, values = _ONE, numbers[bucket * room : (bucket + 1) * room]
                    else:
                        scale, values = numbers[bucket], shared
                    target, part = out[i:stop], codes[i - begin : stop - begin]
                    if entries:
                        done = add_permuted(part, scale, values, target, entries)
                        add_looked_up(part[done:], scale, values, target[done:])
                    elif uniform:
                        _add_uniform(part, scale, alphabet, step, target)
                    elif alphabet <= 16:
                        add_small(part, scale, alphabet, values, target)
                    else:
                        add_looked_up(part, scale, values, target)
                    i = stop
            if factor != 1:
                scale_by(factor, out[begin:end])

    return decode_add


@numba.extending.intrinsic
def pointer(typingctx, address):
    """Convert an int64 address to a void pointer, for numba.carray."""
    signature = numba.types.voidptr(numba.types.int64)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(numba.types.voidptr))

    return signature, codegen
