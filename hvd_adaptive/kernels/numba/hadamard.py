"""Transform as kernels/hadamard.py does, in place in Numba, with the same sums in the same order.

Butterflies of large strides run over the whole buffer two strides at a time. Those below BLOCK run
over pieces that fit the L1 cache, several strides in one trip, and the last six strides of every 64
floats run in vector registers. Those are written as vector instructions because LLVM finds neither
the shuffles between neighbours nor, over runs as short as these, that the runs do not overlap.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hvd_adaptive.kernels.numba.jit import inline, jit, outline
from hvd_adaptive.kernels.numba.lanes import ENTRIES, FLOATS, INTS, LONG, WIDTH, Lanes, emitted

BLOCK = 4096
RUN = 4 * WIDTH
_SIGN = 1 << 31
# Strides in one trip: eight rows of 16 floats and their sums fill the registers of AVX-512.
_ORDER = 8 if ENTRIES == 16 else 4


def _paired(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
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

    def emit(lanes, args, array):
        builder, data, first, apart = lanes.builder, array.data, args[1], args[2]
        starts = [builder.add(first, builder.mul(apart, LONG(k))) for k in range(count)]
        with cgutils.for_range_slice(builder, LONG(0), apart, LONG(WIDTH), LONG) as (at, _):
            places = [builder.add(start, at) for start in starts]
            rows = [lanes.load(data, place, FLOATS) for place in places]
            for row, place in zip(_paired(builder, rows), places, strict=True):
                lanes.store(row, data, place)

    return emitted(types.void(y, types.intp, types.intp, order), emit, 0)


@intrinsic
def last_butterflies(typingctx, y, begin):
    """Apply strides 32, 16, 8, 4, 2, 1 to the 64 floats from y[begin]."""

    def emit(lanes, args, array):
        for place, row in _run(lanes, array.data, args[1]):
            lanes.store(row, array.data, place)

    return emitted(types.void(y, types.intp), emit, 0)


@intrinsic
def add_last_butterflies(typingctx, y, begin, hashes, lane, shift, factor, target):
    """Do as ``last_butterflies``, flip signs, and add the result times factor to target[begin:].

    y does not change. Signs are bit 31 of hashes[lane:] << shift.
    """
    signature = types.void(y, types.intp, hashes, types.intp, types.uint32, types.float32, target)

    def emit(lanes, args, *arrays):
        builder, (data, flips, sums) = lanes.builder, (array.data for array in arrays)
        shift, factor, mask = lanes.spread(args[4]), lanes.spread(args[5]), lanes.integers(_SIGN)
        for index, (place, row) in enumerate(_run(lanes, data, args[1])):
            flip = lanes.load(flips, builder.add(args[3], LONG(index * WIDTH)), INTS)
            flip = builder.and_(builder.shl(flip, shift), mask)
            row = builder.bitcast(builder.xor(builder.bitcast(row, INTS), flip), FLOATS)
            total = builder.fadd(lanes.load(sums, place, FLOATS), builder.fmul(row, factor))
            lanes.store(total, sums, place)

    return emitted(signature, emit, 0, 2, 6)


def _run(lanes: Lanes, data: ir.Value, begin: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """Return the transformed vectors of a run of 64 floats, each with its place."""
    builder = lanes.builder
    places = [builder.add(begin, LONG(k * WIDTH)) for k in range(RUN // WIDTH)]
    rows = _paired(builder, [lanes.load(data, place, FLOATS) for place in places])
    return [(place, _across_lanes(builder, row)) for place, row in zip(places, rows, strict=True)]


@inline
def _butterflies(y, least):
    """Apply strides y.size/2, y.size/4, ..., least."""
    stride = y.size // 2
    while stride >= least:
        for at in range(0, y.size, 2 * stride):
            a, b = y[at : at + stride], y[at + stride : at + 2 * stride]
            for i in range(stride):
                v, w = a[i], b[i]
                a[i] = v + w
                b[i] = v - w
        stride //= 2


@inline
def _multiply(y, columns, total):
    """Multiply each run of m floats of y by the matrix whose padded transpose is ``columns``."""
    m = len(columns)
    for at in range(0, y.size, m):
        run = y[at : at + m]
        total[:] = np.float32(0)
        for q in range(0, m, 4):
            a, b, c, d = run[q], run[q + 1], run[q + 2], run[q + 3]
            for i in range(total.size):
                half = total[i] + columns[q, i] * a + columns[q + 1, i] * b
                total[i] = half + columns[q + 2, i] * c + columns[q + 3, i] * d
        for i in range(m):
            run[i] = total[i]


def padded(matrix: np.ndarray) -> np.ndarray:
    """Return a base's columns as ``apply`` reads them: float32 (m, m rounded up to 16), C order."""
    m = len(matrix)
    columns = np.zeros((m, -(-m // WIDTH) * WIDTH), np.float32)
    columns[:, :m] = matrix.T
    return columns


@jit
def apply(y, columns, total):
    """Multiply y (float32, (p * m,)) by S_p ⊗ B, in place.

    columns: padded(B), or padded(B.T) for the transposed transform. total: scratch, float32
    (columns.shape[1],).
    """
    m = len(columns)
    if m > 1:
        _butterflies(y, m)
        _multiply(y, columns, total)
    elif y.size < RUN:
        _butterflies(y, 1)
    else:
        transform(y)


@outline
def transform(y):
    """Multiply y (float32, (p,)), p a power of two of at least RUN, by S_p, in place."""
    long_strides(y)
    for run in range(0, y.size, RUN):
        last_butterflies(y, run)


@outline
def long_strides(y):
    """Apply all strides from RUN on to y, whose size is a power of two of at least RUN."""
    top = y.size
    while top >= 4 * BLOCK:
        for at in range(0, y.size, top):
            butterflies(y, at, top // 4, numba.literally(4))
        top //= 4
    if top == 2 * BLOCK:
        for at in range(0, y.size, top):
            butterflies(y, at, BLOCK, numba.literally(2))
        top = BLOCK
    for begin in range(0, y.size, top):
        _strides(y[begin : begin + top])


@inline
def _strides(y):
    top = y.size
    while top >= _ORDER * RUN:
        for at in range(0, y.size, top):
            butterflies(y, at, top // _ORDER, numba.literally(_ORDER))
        top //= _ORDER
    if top == 4 * RUN:
        for at in range(0, y.size, top):
            butterflies(y, at, RUN, numba.literally(4))
    elif top == 2 * RUN:
        for at in range(0, y.size, top):
            butterflies(y, at, RUN, numba.literally(2))


@inline
def fold(y, size):
    """Set y[:size] to the result of butterflies of strides n/2, ..., size there."""
    stride = y.size // 2
    while stride >= size:
        a, b = y[:stride], y[stride : 2 * stride]
        for i in range(stride):
            a[i] += b[i]
        stride //= 2


@inline
def repeat(y, size):
    """Fill y with copies of y[:size], in loops: assigning slices costs seconds to compile."""
    while size < y.size:
        for i in range(size):
            y[size + i] = y[i]
        size *= 2
