"""Transform as kernels/hadamard.py does, in place in Numba, with the same sums in the same order.

Butterflies of large strides run over the whole buffer two strides at a time. Those below BLOCK run
over pieces that fit the L1 cache, several strides in one trip, and the last six strides of every 64
floats run in vector registers (butterflies.py).
"""

from __future__ import annotations

import numba
import numpy as np

from hvd_adaptive.kernels.numba.butterflies import RUN, butterflies, last_butterflies
from hvd_adaptive.kernels.numba.jit import inline, jit, outline
from hvd_adaptive.kernels.numba.lanes import FLOATS, LONG, WIDTH, Lanes, arrays_of
from hvd_adaptive.kernels.numba.permute import ENTRIES

BLOCK = 4096
# Strides in one trip: eight rows of 16 floats and their sums fill the registers of AVX-512.
_ORDER = 8 if ENTRIES == 16 else 4


@inline
def _radix2(a, b):
    for i in range(a.size):
        x, y = a[i], b[i]
        a[i] = x + y
        b[i] = x - y


@inline
def _radix4(a, b, c, d):
    """Apply strides 2 s, then s, to four neighbouring runs of s floats."""
    for i in range(a.size):
        w, x, y, z = a[i], b[i], c[i], d[i]
        p, q, r, t = w + y, x + z, w - y, x - z
        a[i] = p + q
        b[i] = p - q
        c[i] = r + t
        d[i] = r - t


@inline
def _butterflies(y, top, least):
    """Apply strides top/2, top/4, ..., least to every ``top`` floats."""
    stride = top // 2
    while stride > least:
        half = stride // 2
        for at in range(0, y.size, 2 * stride):
            _radix4(
                y[at : at + half],
                y[at + half : at + stride],
                y[at + stride : at + stride + half],
                y[at + stride + half : at + 2 * stride],
            )
        stride //= 4
    if stride == least:
        for at in range(0, y.size, 2 * stride):
            _radix2(y[at : at + stride], y[at + stride : at + 2 * stride])


@numba.extending.intrinsic
def _add_four(typingctx, total, columns, run, row, lane):
    """Add columns[row + q, lane + l] * run[row + q] to total[lane + l] for 16 lanes l and q = 0 ...
    3, one q after another.
    """
    signature = numba.types.void(total, columns, run, numba.types.intp, numba.types.intp)

    def codegen(context, builder, signature, args):
        arrays, lanes = arrays_of(context, builder, signature, args, 0, 1, 2), Lanes(builder)
        target, matrix, source = (array.data for array in arrays)
        width = builder.extract_value(arrays[1].shape, 1)
        sums = lanes.load(target, args[4], FLOATS)
        for q in range(4):
            index = builder.add(args[3], LONG(q))
            column = lanes.load(matrix, builder.add(builder.mul(index, width), args[4]), FLOATS)
            value = lanes.spread(builder.load(builder.gep(source, [index])))
            sums = builder.fadd(sums, builder.fmul(column, value))
        lanes.store(sums, target, args[4])
        return context.get_dummy_value()

    return signature, codegen


@inline
def _multiply(y, columns, total):
    """Multiply each run of m floats of y by the matrix whose padded transpose is ``columns``."""
    m = len(columns)
    for at in range(0, y.size, m):
        run = y[at : at + m]
        total[:] = np.float32(0)
        for lane in range(0, total.size, WIDTH):
            for row in range(0, m, 4):
                _add_four(total, columns, run, row, lane)
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
        _butterflies(y, y.size, m)
        _multiply(y, columns, total)
    elif y.size < RUN:
        _butterflies(y, y.size, 1)
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
