"""Unpack codes and look their levels up in vector registers, without a trip to memory between."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from hvd_adaptive.kernels.fixed import LANES, QUARTER, QUARTERS, ROWS
from hvd_adaptive.kernels.numba.lanes import FLOATS, INTS, LONG, Lanes, arrays_of
from hvd_adaptive.kernels.numba.permute import TableLanes

MOST_BITS = 4  # of codes whose 16 levels fill one register


@intrinsic(prefer_literal=True)
def take_block(typingctx, words, values, scale, y, begin, bits):
    """Set y[begin:][:512] to scale times the levels of 512 packed codes (kernels/fixed.py).

    values: 16 levels; level c is also at every c + k 2**bits. bits: a constant, 1 to 4.
    """
    count = bits.literal_value
    signature = types.void(words, values, types.float32, y, types.intp, bits)

    def codegen(context, builder, signature, args):
        arrays = arrays_of(context, builder, signature, args, 0, 1, 3)
        (source, levels, target), lanes = (array.data for array in arrays), TableLanes(builder)
        factor = lanes.spread(args[2])
        table = builder.fmul(lanes.load(levels, LONG(0), FLOATS), factor)
        if lanes.entries:
            held = lanes.registers(table)[: max(1, (1 << count) // lanes.entries)]
        else:
            held = _spread_entries(lanes, table, 1 << count)
        for place, shift, value in _rows(lanes, source, count):
            if lanes.entries:
                level = lanes.look_up(held, lanes.shifted(value, -shift))
            else:
                level = _select(lanes, held, value, shift)
            lanes.store(level, target, builder.add(args[4], LONG(place)))
        return context.get_dummy_value()

    return signature, codegen


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


def _spread_entries(lanes: Lanes, table: ir.Value, count: int) -> list[ir.Value]:
    index = ir.IntType(32)
    return [lanes.spread(lanes.builder.extract_element(table, index(k))) for k in range(count)]


def _select(lanes: Lanes, entries: list[ir.Value], value: ir.Value, shift: int) -> ir.Value:
    """Return entries[code], by selections on the code's bits, the lowest first."""
    builder, bit = lanes.builder, shift
    while len(entries) > 1:
        is_set = builder.icmp_signed("<", lanes.shifted(value, 31 - bit), lanes.integers(0))
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [builder.select(is_set, high, low) for low, high in pairs]
        bit += 1
    return entries[0]
