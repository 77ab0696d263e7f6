"""Numba: codes become words, laid out as coding/fixed.py says."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.coding.fixed import LANES, QUARTERS
from hvd_adaptive.kernels.jit import inline


@inline
def _piece(row, shift, width):
    """The part of a row of ``width`` bits, put at bit ``shift``, that falls into one word."""
    if 0 <= shift < 32:
        return np.uint32(row << np.uint32(shift))
    if -width < shift < 0:
        return np.uint32(row >> np.uint32(-shift))
    return np.uint32(0)


@inline
def _word(index, width, r0, r1, r2, r3, r4, r5, r6, r7):
    at = -32 * index
    return np.uint32(
        _piece(r0, at, width)
        | _piece(r1, at + width, width)
        | _piece(r2, at + 2 * width, width)
        | _piece(r3, at + 3 * width, width)
        | _piece(r4, at + 4 * width, width)
        | _piece(r5, at + 5 * width, width)
        | _piece(r6, at + 6 * width, width)
        | _piece(r7, at + 7 * width, width)
    )


@inline
def store_block(rows, bits, words):
    """8 rows of 4 * bits bits become ``bits`` words, 16 lanes side by side.

    Written without loops over rows and words, so that all shifts are constants.
    """
    width = QUARTERS * bits
    for lane in range(LANES):
        r0, r1 = rows[lane], rows[LANES + lane]
        r2, r3 = rows[2 * LANES + lane], rows[3 * LANES + lane]
        r4, r5 = rows[4 * LANES + lane], rows[5 * LANES + lane]
        r6, r7 = rows[6 * LANES + lane], rows[7 * LANES + lane]
        words[lane] = _word(0, width, r0, r1, r2, r3, r4, r5, r6, r7)
        if bits > 1:
            words[LANES + lane] = _word(1, width, r0, r1, r2, r3, r4, r5, r6, r7)
        if bits > 2:
            words[2 * LANES + lane] = _word(2, width, r0, r1, r2, r3, r4, r5, r6, r7)
        if bits > 3:
            words[3 * LANES + lane] = _word(3, width, r0, r1, r2, r3, r4, r5, r6, r7)
        if bits > 4:
            words[4 * LANES + lane] = _word(4, width, r0, r1, r2, r3, r4, r5, r6, r7)
        if bits > 5:
            words[5 * LANES + lane] = _word(5, width, r0, r1, r2, r3, r4, r5, r6, r7)
        if bits > 6:
            words[6 * LANES + lane] = _word(6, width, r0, r1, r2, r3, r4, r5, r6, r7)
        if bits > 7:
            words[7 * LANES + lane] = _word(7, width, r0, r1, r2, r3, r4, r5, r6, r7)


@inline
def store_partial(rows, count, bits, words):
    """The same for the last ``count`` <= 8 rows of a payload."""
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
