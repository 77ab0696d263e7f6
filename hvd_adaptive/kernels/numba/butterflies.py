"""Apply the butterflies of Hadamard matrices in vector registers, many strides in one trip.

The code is written as vector instructions because LLVM finds neither the shuffles between
neighbours nor, over runs as short as these, that the runs do not overlap.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hvd_adaptive.kernels.numba.lanes import FLOATS, INTS, LONG, WIDTH, Lanes, arrays_of

RUN = 4 * WIDTH
_SIGN = 1 << 31


def _butterflies(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Apply strides len(rows)/2, ..., 1 to vectors: the first of a pair gets the sum."""
    half = len(rows) // 2
    while half:
        for at in range(0, len(rows), 2 * half):
            for i in range(at, at + half):
                a, b = rows[i], rows[i + half]
                rows[i], rows[i + half] = builder.fadd(a, b), builder.fsub(a, b)
        half //= 2
    return rows


def _across_lanes(builder: ir.IRBuilder, row: ir.Value) -> ir.Value:
    """Apply strides 8, 4, 2, 1 inside a vector: add each lane to its partner or subtract it."""
    lanes = range(WIDTH)
    for stride in (8, 4, 2, 1):
        partners = ir.Constant(INTS, [lane ^ stride for lane in lanes])
        swapped = builder.shuffle_vector(row, row, partners)
        signs = ir.Constant(INTS, [_SIGN if lane & stride else 0 for lane in lanes])
        signed = builder.bitcast(builder.xor(builder.bitcast(row, INTS), signs), FLOATS)
        row = builder.fadd(swapped, signed)
    return row


@intrinsic(prefer_literal=True)
def butterflies(typingctx, y, begin, stride, order):
    """Apply strides order/2 * stride, ..., 2 * stride, stride to y[begin:][:order * stride].

    stride: a multiple of 16. order: a constant, a power of two.
    """
    count = order.literal_value
    signature = types.void(y, types.intp, types.intp, order)

    def codegen(context, builder, signature, args):
        data, lanes = arrays_of(context, builder, signature, args, 0)[0].data, Lanes(builder)
        first, apart = args[1], args[2]
        starts = [builder.add(first, builder.mul(apart, LONG(k))) for k in range(count)]
        with cgutils.for_range_slice(builder, LONG(0), apart, LONG(WIDTH), LONG) as (at, _):
            places = [builder.add(start, at) for start in starts]
            rows = [lanes.load(data, place, FLOATS) for place in places]
            for row, place in zip(_butterflies(builder, rows), places, strict=True):
                lanes.store(row, data, place)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def last_butterflies(typingctx, y, begin):
    """Apply strides 32, 16, 8, 4, 2, 1 to the 64 floats from y[begin]."""
    signature = types.void(y, types.intp)

    def codegen(context, builder, signature, args):
        data, lanes = arrays_of(context, builder, signature, args, 0)[0].data, Lanes(builder)
        for place, row in _run(lanes, data, args[1]):
            lanes.store(row, data, place)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_last_butterflies(typingctx, y, begin, hashes, lane, shift, factor, target):
    """Do as ``last_butterflies``, flip signs, and add the result times factor to target[begin:].

    y does not change. Signs are bit 31 of hashes[lane:] << shift.
    """
    signature = types.void(y, types.intp, hashes, types.intp, types.uint32, types.float32, target)

    def codegen(context, builder, signature, args):
        arrays = arrays_of(context, builder, signature, args, 0, 2, 6)
        (data, flips, sums), lanes = (array.data for array in arrays), Lanes(builder)
        shift, factor, mask = lanes.spread(args[4]), lanes.spread(args[5]), lanes.integers(_SIGN)
        for index, (place, row) in enumerate(_run(lanes, data, args[1])):
            flip = lanes.load(flips, builder.add(args[3], LONG(index * WIDTH)), INTS)
            flip = builder.and_(builder.shl(flip, shift), mask)
            row = builder.bitcast(builder.xor(builder.bitcast(row, INTS), flip), FLOATS)
            total = builder.fadd(lanes.load(sums, place, FLOATS), builder.fmul(row, factor))
            lanes.store(total, sums, place)
        return context.get_dummy_value()

    return signature, codegen


def _run(lanes: Lanes, data: ir.Value, begin: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """Return the transformed vectors of a run of 64 floats, each with its place."""
    builder = lanes.builder
    places = [builder.add(begin, LONG(k * WIDTH)) for k in range(RUN // WIDTH)]
    rows = _butterflies(builder, [lanes.load(data, place, FLOATS) for place in places])
    return [(place, _across_lanes(builder, row)) for place, row in zip(places, rows, strict=True)]
