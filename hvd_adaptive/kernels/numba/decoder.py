"""Unpack, look up, scale and add over all ranks' payloads in Numba, block by block."""

from __future__ import annotations

import functools

import numba
import numpy as np

from hvd_adaptive.kernels.numba.codes import chunk_size, load_fixed, load_units
from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.permute import add_values, entries_of
from hvd_adaptive.kernels.packing import Packing, check_sections

_ONE = np.float32(1)


@inline
def _add_uniform(part, scale, alphabet, step, target):
    """Add values by the same products as in tables.kernel_table."""
    last = np.int32(alphabet - 1)
    for j in range(target.size):
        k = np.int32(np.int32(np.int32(part[j]) * np.int32(2)) - last)
        target[j] += np.float32(np.float32(k) * step) * scale


@inline
def add_looked_up(part, scale, values, target):
    for j in range(target.size):
        target[j] += values[np.uint64(part[j])] * scale


@inline
def scale_by(factor, target):
    for j in range(target.size):
        target[j] *= factor


@functools.cache
def decoder_of(own: bool, uniform: bool, packing: Packing):
    """Return the decoder for one packing, which is a constant of the compiled code.

    own: buckets have levels of their own, ``room`` numbers each, else a scale.
    """
    chunk, entries = chunk_size(packing), 0 if uniform else entries_of(packing.alphabet)
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
                        done = add_values(part, scale, values, target, entries)
                        add_looked_up(part[done:], scale, values, target[done:])
                    elif uniform:
                        _add_uniform(part, scale, alphabet, step, target)
                    else:
                        add_looked_up(part, scale, values, target)
                    i = stop
            if factor != 1:
                scale_by(factor, out[begin:end])

    return decode_add


def addresses(payloads, name, rows, words):
    """Return the addresses of the payloads' rows and words, int64 each, and the number of words;
    see check_sections.
    """
    check_sections(payloads, name, rows, words)
    at = (np.array([pair[part].data_ptr() for pair in payloads], np.int64) for part in (0, 1))
    return *at, words


@numba.extending.intrinsic
def pointer(typingctx, address):
    """Convert an int64 address to a void pointer, for numba.carray."""
    signature = numba.types.voidptr(numba.types.int64)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(numba.types.voidptr))

    return signature, codegen
