"""Convert codes of small alphabets to numbers and back in Numba, as in kernels/radix.py."""

from __future__ import annotations

import numpy as np

from hvd_adaptive.kernels.numba.jit import inline
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


@inline
def load_row(words, alphabet, digits, width, row, units, codes):
    """Invert ``store_row``."""
    at, shift = (row * width) // 32 * LANES, (row * width) % 32
    for lane in range(LANES):
        units[lane] = np.uint32(words[at + lane] >> np.uint32(shift))
    if shift + width > 32:
        for lane in range(LANES):
            units[lane] |= np.uint32(words[at + LANES + lane] << np.uint32(32 - shift))
    mask = np.uint32(0xFFFFFFFF >> (32 - width))
    for lane in range(LANES):
        unit = np.uint32(units[lane] & mask)
        for digit in range(digits):
            rest = np.uint32(unit // np.uint32(alphabet))
            codes[digit * LANES + lane] = np.uint32(unit - np.uint32(rest * np.uint32(alphabet)))
            unit = rest
