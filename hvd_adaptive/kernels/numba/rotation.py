"""Rotate buckets by random signs and Hadamard matrices in Numba (EDEN), and rotate them back."""

from __future__ import annotations

import functools

import numpy as np

from hvd_adaptive.kernels.eden import APART, SPAN, block_order, weight_of
from hvd_adaptive.kernels.numba.hadamard import RUN, add_last_butterflies, long_strides, transform
from hvd_adaptive.kernels.numba.jit import inline, outline
from hvd_adaptive.kernels.numba.random import bucket_key, counter_of, mixed

_SIGN = np.uint32(1 << 31)
_LINE = 64  # bytes of a cache line, and of a vector register


@functools.lru_cache(maxsize=256)
def factors_of(size: int, last: int, rotations: int) -> np.ndarray:
    """Return a row for whole buckets, and one for the partial bucket: m**-0.5, the weight of S
    after so many rotations, and length**-0.5.
    """
    rows = [
        (block_order(length) ** -0.5, weight_of(length, rotations), length**-0.5)
        for length in (size, max(last, 1))
    ]
    return np.array(rows, dtype=np.float32)


@inline
def aligned(count):
    """Return uninitialised float32 (count,) that begins with a cache line."""
    memory = np.empty(count + _LINE // 4, np.float32)
    skip = -memory.ctypes.data % _LINE // 4
    return memory[skip : skip + count]


@inline
def hash(stream, bucket, begin, hashes):
    """Set hashes (uint32 (APART,)) to those of a bucket's coordinates from ``begin`` on."""
    low, high = bucket_key(stream, bucket)
    first = np.uint32(begin // SPAN * APART)
    for lane in range(APART):
        hashes[lane] = mixed(counter_of(np.uint32(first + np.uint32(lane)), low), high)


@outline
def flip(y, stream, bucket, hashes):
    """Give y the bucket's signs. hashes: uint32 (APART,)."""
    bits = y.view(np.uint32)
    for begin in range(0, y.size, SPAN):
        hash(stream, bucket, begin, hashes)
        span = bits[begin : min(y.size, begin + SPAN)]
        for row in range((span.size + APART - 1) // APART):
            part = span[row * APART : min(span.size, (row + 1) * APART)]
            shift = np.uint32(31 - row)
            for lane in range(part.size):
                part[lane] ^= np.uint32(np.uint32(hashes[lane] << shift) & _SIGN)


@inline
def add_rotated_back(y, root, stream, bucket, factor, hashes, target):
    """Undo a rotation of y, and add y times factor to target, which may be shorter."""
    if y.size < RUN or y.size & (y.size - 1) or target.size < y.size:
        rotate(y, root, stream, bucket, hashes, True)
        _add(y, factor, target)
        return
    long_strides(y)
    for begin in range(0, y.size, SPAN):
        hash(stream, bucket, begin, hashes)
        for at in range(begin, min(y.size, begin + SPAN), RUN):
            shift = np.uint32(31 - (at - begin) // APART)
            add_last_butterflies(y, at, hashes, at % APART, shift, factor, target)


@outline
def _add(y, factor, target):
    # LLVM does not vectorise the loop inside of the decoder.
    for i in range(target.size):
        target[i] += y[i] * factor


@inline
def times(y, factor):
    for i in range(y.size):
        y[i] *= factor


@outline
def rotate(y, root, stream, bucket, hashes, back):
    """See kernels.eden.rotate; root: m**-0.5, hashes: uint32 (APART,)."""
    m = 1
    while 2 * m <= y.size:
        m *= 2
    rest, shift = y.size - m, m * m // y.size
    turns = 4 if rest else 1
    for number in range(turns):
        turn = turns - 1 - number if back else number
        begin = turn % 2 * rest
        part = y[begin : begin + m]
        if back and turn % 2:
            _roll(y, y.size - shift)
        if not back:
            flip(y, stream, bucket + turn, hashes)
        transform(part)
        if rest:
            times(part, root)
        if back:
            flip(y, stream, bucket + turn, hashes)
        elif turn % 2:
            _roll(y, shift)


@outline
def _roll(y, shift):
    before = y.copy()
    y[shift:] = before[: y.size - shift]
    y[:shift] = before[y.size - shift :]
