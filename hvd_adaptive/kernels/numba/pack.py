"""Pack codes into words in Numba, laid out as in kernels/fixed.py."""

from __future__ import annotations

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from hvd_adaptive.kernels.fixed import LANES, QUARTER, QUARTERS, ROWS
from hvd_adaptive.kernels.numba.jit import inline
from hvd_adaptive.kernels.numba.lanes import INTS, LONG, Lanes, arrays_of


@inline
def _piece(row, shift, width):
    """Return the part of a row of ``width`` bits, put at bit ``shift``, that one word holds."""
    if 0 <= shift < 32:
        return np.uint32(row << np.uint32(shift))
    if -width < shift < 0:
        return np.uint32(row >> np.uint32(-shift))
    return np.uint32(0)


@intrinsic(prefer_literal=True)
def store_block(typingctx, codes, words, bits):
    """Pack 512 codes of ``bits`` bits, a constant, into ``bits`` words for each of 16 lanes."""
    count = bits.literal_value
    width = QUARTERS * count
    signature = types.void(codes, words, bits)

    def codegen(context, builder, signature, args):
        arrays = arrays_of(context, builder, signature, args, 0, 1)
        source, target = (array.data for array in arrays)
        lanes, packed = Lanes(builder), [None] * count
        for row in range(ROWS):
            value = None
            for quarter in range(QUARTERS):
                code = lanes.load(source, LONG(quarter * QUARTER + row * LANES), INTS)
                code = lanes.shifted(code, quarter * count)
                value = code if value is None else builder.or_(value, code)
            for word in range(row * width // 32, ((row + 1) * width - 1) // 32 + 1):
                piece = lanes.shifted(value, row * width - 32 * word)
                packed[word] = piece if packed[word] is None else builder.or_(packed[word], piece)
        for word, value in enumerate(packed):
            lanes.store(value, target, LONG(word * LANES))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def load_block(typingctx, words, codes, bits):
    """Invert store_block."""
    count = bits.literal_value
    width = QUARTERS * count
    signature = types.void(words, codes, bits)

    def codegen(context, builder, signature, args):
        arrays = arrays_of(context, builder, signature, args, 0, 1)
        source, target = (array.data for array in arrays)
        lanes = Lanes(builder)
        packed = [lanes.load(source, LONG(word * LANES), INTS) for word in range(count)]
        mask = lanes.integers((1 << count) - 1)
        for row in range(ROWS):
            word, shift = divmod(row * width, 32)
            value = lanes.shifted(packed[word], -shift)
            if shift + width > 32:
                value = builder.or_(value, lanes.shifted(packed[word + 1], 32 - shift))
            for quarter in range(QUARTERS):
                code = builder.and_(lanes.shifted(value, -quarter * count), mask)
                lanes.store(code, target, LONG(quarter * QUARTER + row * LANES))
        return context.get_dummy_value()

    return signature, codegen


@inline
def store_partial(rows, count, bits, words):
    """Store the last ``count`` < 8 rows of a payload, 4 * bits bits each."""
    width = QUARTERS * bits
    for word in range((count * width + 31) // 32):
        for lane in range(LANES):
            value = np.uint32(0)
            for row in range(count):
                value |= _piece(rows[row * LANES + lane], row * width - 32 * word, width)
            words[word * LANES + lane] = value


@inline
def merge_quarters(codes, quarter, bits, rows):
    for i in range(quarter):
        rows[i] = (
            codes[i]
            | np.uint32(codes[i + quarter] << np.uint32(bits))
            | np.uint32(codes[i + 2 * quarter] << np.uint32(2 * bits))
            | np.uint32(codes[i + 3 * quarter] << np.uint32(3 * bits))
        )
