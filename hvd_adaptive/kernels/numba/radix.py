"""Convert codes of small alphabets to numbers and back in Numba, as in kernels/radix.py."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from hvd_adaptive.kernels.numba.jit import inline
from hvd_adaptive.kernels.numba.lanes import INT, INTS, LONG, Lanes, arrays_of
from hvd_adaptive.kernels.radix import LANES


@inline
def store_row(codes, alphabet, digits, width, row, units, words):
    """Store 16 units of ``digits`` codes each as row ``row`` of the lanes' streams.

    Rows come in order: the first row that begins a word overwrites the word's old content. units:
    room for 16. The loops are separate so that each is vectorised.
    """
    for lane in range(LANES):
        unit = codes[(digits - 1) * LANES + lane]
        for digit in range(digits - 2, -1, -1):
            unit = np.uint32(np.uint32(unit * np.uint32(alphabet)) + codes[digit * LANES + lane])
        units[lane] = unit
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


@intrinsic(prefer_literal=True)
def load_row(typingctx, words, row, codes, alphabet, digits, width):
    """Invert ``store_row``; the last three arguments are constants.

    A unit U below M = A**digits has the fraction F / 2**32 with F = floor(2**32 U / M) + 1. This is
    larger than U / M and at most (U + 1) / M, as M < 2**32, so both have the same digits to base A:
    multiplying by A moves the next one, the first of which is the last code, above the point. A
    multiplication gives digits of 8 lanes, where division by A takes several.

    A forged unit of M or more gives other codes below A.
    """
    base, count, bits = (of.literal_value for of in (alphabet, digits, width))
    signature = types.void(words, types.int64, codes, alphabet, digits, width)

    def codegen(context, builder, signature, args):
        arrays = arrays_of(context, builder, signature, args, 0, 2)
        source, target = (array.data for array in arrays)
        lanes, half = Lanes(builder), ir.VectorType(LONG, LANES // 2)
        units = _units(builder, lanes, source, args[1], bits)

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
            lanes.store(builder.bitcast(code, INTS), target, LONG(digit * LANES))
        return context.get_dummy_value()

    return signature, codegen


def _units(
    builder: ir.IRBuilder, lanes: Lanes, words: ir.Value, row: ir.Value, width: int
) -> ir.Value:
    """Return row ``row`` of the lanes' streams, whose bits may be in two words of each lane."""
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
