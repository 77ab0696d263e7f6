"""Pack codes into words and unpack them in Numba, laid out as packing.py describes."""

from __future__ import annotations

import functools

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from hvd_adaptive.kernels.numba.jit import inline, jit
from hvd_adaptive.kernels.numba.lanes import INT, INTS, LONG, Lanes, emitted
from hvd_adaptive.kernels.packing import BLOCK, LANES, QUARTER, QUARTERS, ROWS, Packing, check_words


def pack(codes, packing, words):
    _packer(packing)(codes.numpy(), words.numpy().view(np.uint32))


def unpack(words, packing, codes):
    check_words(words, packing, codes)
    _unpacker(packing)(words.numpy().view(np.uint32), codes.numpy())


def chunk_size(packing: Packing) -> int:
    """Return the coordinates packed at a time: a block of fixed width, or some rows of units."""
    if packing.digits == 1:
        return BLOCK
    row = LANES * packing.digits
    return -(-BLOCK // row) * row


# Kernels choose between units and fixed width by a constant of theirs, so that Numba compiles only
# one of the two.
@inline
def store_units(codes, index, rest, chunk, alphabet, digits, width, units, words):
    """Pack chunk ``index``, which has ``rest`` coordinates, in units of several digits. units: room
    for 16.
    """
    row = LANES * digits
    first, count = index * (chunk // row), (rest + row - 1) // row
    codes[rest : count * row] = np.uint32(0)
    for k in range(count):
        part = codes[k * row : (k + 1) * row]
        # The loops are separate so that each is vectorised.
        for lane in range(LANES):
            unit = part[(digits - 1) * LANES + lane]
            for digit in range(digits - 2, -1, -1):
                unit = np.uint32(np.uint32(unit * np.uint32(alphabet)) + part[digit * LANES + lane])
            units[lane] = unit
        _store_row(units, first + k, width, words)


@inline
def store_fixed(codes, index, rest, width, units, words):
    """Pack block ``index``, which has ``rest`` coordinates, in codes of ``width`` bits."""
    at = index * width * LANES
    if rest == BLOCK:
        store_block(codes, words[at : at + width * LANES], numba.literally(width))
    else:
        store_tail(codes, rest, width, units, words[at:])


@inline
def store_tail(codes, rest, width, units, words):
    """Pack the last block of ``rest`` coordinates, which is not whole; return its words."""
    count = (rest + QUARTERS * LANES - 1) // (QUARTERS * LANES)
    quarter = count * LANES
    codes[rest : QUARTERS * quarter] = np.uint32(0)
    for row in range(count):
        for lane in range(LANES):
            i = row * LANES + lane
            units[lane] = (
                codes[i]
                | np.uint32(codes[i + quarter] << np.uint32(width))
                | np.uint32(codes[i + 2 * quarter] << np.uint32(2 * width))
                | np.uint32(codes[i + 3 * quarter] << np.uint32(3 * width))
            )
        _store_row(units, row, QUARTERS * width, words)
    return (count * QUARTERS * width + 31) // 32 * LANES


@inline
def _store_row(units, row, width, words):
    """Store 16 units as row ``row`` of the lanes' streams.

    Rows come in order: the first row that begins a word overwrites the word's old content.
    """
    at, shift = (row * width) // 32 * LANES, (row * width) % 32
    if shift == 0:
        for lane in range(LANES):  # assigning a slice takes Numba two seconds to compile
            words[at + lane] = units[lane]
        return
    for lane in range(LANES):
        words[at + lane] |= np.uint32(units[lane] << np.uint32(shift))
    if shift + width > 32:
        for lane in range(LANES):
            words[at + LANES + lane] = np.uint32(units[lane] >> np.uint32(32 - shift))


@inline
def load_units(words, index, rest, chunk, alphabet, digits, width, codes):
    """Invert ``store_units``."""
    row = LANES * digits
    first = index * (chunk // row)
    for k in range((rest + row - 1) // row):
        load_row(
            words,
            first + k,
            codes[k * row :],
            numba.literally(alphabet),
            numba.literally(digits),
            numba.literally(width),
        )


@inline
def load_fixed(words, index, rest, width, codes):
    """Invert ``store_fixed``."""
    block = words[index * width * LANES :]
    if rest > (ROWS - 1) * QUARTERS * LANES:
        load_block(block, codes, numba.literally(width))
        return
    quarter = (rest + QUARTERS * LANES - 1) // (QUARTERS * LANES) * LANES
    mask = np.uint32((1 << width) - 1)
    for i in range(quarter):
        unit = _unit(block, i // LANES, QUARTERS * width, i % LANES)
        for part in range(QUARTERS):
            codes[i + part * quarter] = np.uint32(unit >> np.uint32(part * width)) & mask


@inline
def _unit(words, row, width, lane):
    """Return row ``row`` of a lane: ``width`` bits that may straddle two words; bits above them."""
    at, shift = (row * width) // 32 * LANES + lane, (row * width) % 32
    unit = np.uint32(words[at] >> np.uint32(shift))
    if shift + width > 32:
        unit |= np.uint32(words[at + LANES] << np.uint32(32 - shift))
    return unit


@intrinsic(prefer_literal=True)
def store_block(typingctx, codes, words, bits):
    """Pack 512 codes of ``bits`` bits, a constant, into ``bits`` words for each of 16 lanes."""
    count = bits.literal_value
    width = QUARTERS * count

    def emit(lanes, args, source, target):
        builder, packed = lanes.builder, [None] * count
        for row in range(ROWS):
            value = None
            for quarter in range(QUARTERS):
                code = lanes.load(source.data, LONG(quarter * QUARTER + row * LANES), INTS)
                code = lanes.shifted(code, quarter * count)
                value = code if value is None else builder.or_(value, code)
            for word in range(row * width // 32, ((row + 1) * width - 1) // 32 + 1):
                piece = lanes.shifted(value, row * width - 32 * word)
                packed[word] = piece if packed[word] is None else builder.or_(packed[word], piece)
        for word, value in enumerate(packed):
            lanes.store(value, target.data, LONG(word * LANES))

    return emitted(types.void(codes, words, bits), emit, 0, 1)


@intrinsic(prefer_literal=True)
def load_block(typingctx, words, codes, bits):
    """Invert store_block."""
    count = bits.literal_value
    width = QUARTERS * count

    def emit(lanes, args, source, target):
        builder = lanes.builder
        packed = [lanes.load(source.data, LONG(word * LANES), INTS) for word in range(count)]
        mask = lanes.integers((1 << count) - 1)
        for row in range(ROWS):
            word, shift = divmod(row * width, 32)
            value = lanes.shifted(packed[word], -shift)
            if shift + width > 32:
                value = builder.or_(value, lanes.shifted(packed[word + 1], 32 - shift))
            for quarter in range(QUARTERS):
                code = builder.and_(lanes.shifted(value, -quarter * count), mask)
                lanes.store(code, target.data, LONG(quarter * QUARTER + row * LANES))

    return emitted(types.void(words, codes, bits), emit, 0, 1)


@intrinsic(prefer_literal=True)
def load_row(typingctx, words, row, codes, alphabet, digits, width):
    """Unpack row ``row`` of units; the last three arguments are constants.

    A unit U below M = A**digits has the fraction F / 2**32 with F = floor(2**32 U / M) + 1. This is
    larger than U / M and at most (U + 1) / M, as M < 2**32, so both have the same digits to base A:
    multiplying by A moves the next one, the first of which is the last code, above the point. A
    multiplication gives digits of 8 lanes, where division by A takes several.

    A forged unit of M or more gives other codes below A.
    """
    base, count, bits = (of.literal_value for of in (alphabet, digits, width))

    def emit(lanes, args, source, target):
        builder, half = lanes.builder, ir.VectorType(LONG, LANES // 2)
        units = _units(lanes, source.data, args[1], bits)

        def constant(value: int) -> ir.Value:
            return ir.Constant(half, [value] * (LANES // 2))

        low, by_32 = constant(0xFFFFFFFF), constant(32)
        # 2**32 / M in three words, the first before the point; the last one is rounded up.
        factor = -(-(2**96) // base**count)
        parts = [constant(factor >> shift & 0xFFFFFFFF) for shift in (64, 32, 0)]

        def fraction(unit: ir.Value) -> ir.Value:
            whole, second, third = (builder.mul(unit, part) for part in parts)
            second = builder.add(second, builder.lshr(third, by_32))
            return builder.add(builder.add(whole, builder.lshr(second, by_32)), constant(1))

        both = builder.bitcast(units, half)
        even, odd = fraction(builder.and_(both, low)), fraction(builder.lshr(both, by_32))
        for digit in reversed(range(count)):
            even, odd = (builder.mul(builder.and_(f, low), constant(base)) for f in (even, odd))
            high = builder.and_(odd, constant(0xFFFFFFFF << 32))
            code = builder.or_(builder.lshr(even, by_32), high)
            lanes.store(builder.bitcast(code, INTS), target.data, LONG(digit * LANES))

    return emitted(types.void(words, types.int64, codes, alphabet, digits, width), emit, 0, 2)


def _units(lanes: Lanes, words: ir.Value, row: ir.Value, width: int) -> ir.Value:
    """Return row ``row`` of the lanes' streams, whose bits may be in two words of each lane."""
    builder = lanes.builder
    begin = builder.mul(row, LONG(width))
    at = builder.mul(builder.lshr(begin, LONG(5)), LONG(LANES))
    shift = builder.trunc(builder.and_(begin, LONG(31)), INT)
    units = builder.lshr(lanes.load(words, at, INTS), lanes.spread(shift))
    is_in_two = builder.icmp_unsigned(">", shift, INT(32 - width))
    rest = builder.select(is_in_two, builder.sub(INT(32), shift), INT(0))
    next_at = builder.select(is_in_two, builder.add(at, LONG(LANES)), at)
    above = builder.shl(lanes.load(words, next_at, INTS), lanes.spread(rest))
    units = builder.or_(units, builder.select(is_in_two, above, lanes.integers(0)))
    return builder.and_(units, lanes.integers((1 << width) - 1))


@functools.cache
def _packer(packing: Packing):
    chunk = chunk_size(packing)
    alphabet, digits, width = packing

    @jit
    def pack(codes, words):
        block, units = np.empty(chunk, np.uint32), np.empty(LANES, np.uint32)
        for index in range((codes.size + chunk - 1) // chunk):
            part = codes[index * chunk : (index + 1) * chunk]
            for i in range(part.size):
                block[i] = np.uint32(part[i])
            if digits > 1:
                store_units(block, index, part.size, chunk, alphabet, digits, width, units, words)
            else:
                store_fixed(block, index, part.size, width, units, words)

    return pack


@functools.cache
def _unpacker(packing: Packing):
    chunk = chunk_size(packing)
    alphabet, digits, width = packing

    @jit
    def unpack(words, codes):
        block = np.empty(chunk, np.uint32)
        for index in range((codes.size + chunk - 1) // chunk):
            part = codes[index * chunk : (index + 1) * chunk]
            if digits > 1:
                load_units(words, index, part.size, chunk, alphabet, digits, width, block)
            else:
                load_fixed(words, index, part.size, width, block)
            for i in range(part.size):
                part[i] = np.uint8(block[i])

    return unpack
