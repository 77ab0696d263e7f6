"""Read, write and search streams of bits in Numba."""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir

from hvd_adaptive.kernels.numba.jit import inline
from hvd_adaptive.kernels.numba.lanes import LONG, emitted


def _address(lanes, array, at):
    """Return the address of byte ``at`` of an array of bytes."""
    start = lanes.builder.bitcast(array.data, ir.IntType(8).as_pointer())
    return lanes.builder.bitcast(lanes.builder.gep(start, [at]), LONG.as_pointer())


@numba.extending.intrinsic
def load64(typingctx, array, at):
    """Read the uint64 at byte ``at`` (int64) of a contiguous uint8 array, whatever its alignment.
    The caller guarantees that these bytes exist.
    """

    def emit(lanes, args, data):
        return lanes.builder.load(_address(lanes, data, args[1]), align=1)

    return emitted(numba.types.uint64(array, numba.types.int64), emit, 0)


@numba.extending.intrinsic
def store64(typingctx, array, at, value):
    """Write a uint64 at byte ``at`` (int64) of a contiguous uint8 array; see ``load64``."""

    def emit(lanes, args, data):
        lanes.builder.store(args[2], _address(lanes, data, args[1]), align=1)

    return emitted(numba.types.void(array, numba.types.int64, numba.types.uint64), emit, 0)


@numba.extending.intrinsic
def lowest_one(typingctx, bits):
    """Return the place (int64) of the lowest 1 of a uint64 that is not 0."""

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return numba.types.int64(numba.types.uint64), codegen


@numba.extending.intrinsic
def ones_in(typingctx, bits):
    """Return the number (int64) of ones of a uint64."""

    def codegen(context, builder, signature, args):
        return builder.ctpop(args[0])

    return numba.types.int64(numba.types.uint64), codegen


@inline
def next_one(words, at):
    """Return the place of the first 1 at or after bit ``at`` of words (uint32 or uint64), or their
    length in bits.
    """
    shift = 5 if words.itemsize == 4 else 6
    word, bits = at >> shift, np.int64(words.size << shift)
    if word >= words.size:
        return bits
    rest = np.uint64(words[word]) >> np.uint64(at & ((1 << shift) - 1))
    if rest != 0:
        return at + lowest_one(rest)
    word += 1
    while word < words.size and words[word] == 0:
        word += 1
    return bits if word >= words.size else (word << shift) + lowest_one(np.uint64(words[word]))


@inline
def put_bits(words, log, at, value, width):
    """Put ``value`` at bit ``at`` of words of 2**log bits that are still zero there. It has
    ``width`` bits: at most 32 for words of 32 bits, fewer than 64 for others.
    """
    word, shift, value = at >> log, at & ((1 << log) - 1), np.uint64(value)
    words[word] |= words.dtype.type(np.uint64(value << np.uint64(shift)))
    if shift + width > 1 << log:
        words[word + 1] |= words.dtype.type(np.uint64(value >> np.uint64((1 << log) - shift)))


@inline
def bits_at(words, log, at, width):
    """Return the ``width`` bits at bit ``at`` (see ``put_bits``); the caller guarantees that they
    exist.
    """
    word, shift = at >> log, at & ((1 << log) - 1)
    value = np.uint64(np.uint64(words[word]) >> np.uint64(shift))
    if shift + width > 1 << log:
        value |= np.uint64(np.uint64(words[word + 1]) << np.uint64((1 << log) - shift))
    return np.int64(value & np.uint64((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
