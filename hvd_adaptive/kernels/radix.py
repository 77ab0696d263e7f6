"""Compute the sizes of radix packing: several codes of a small alphabet in one number.

The loops are in kernels/. A unit of ``digits`` codes of an alphabet A is sum_t code_t A**t, a
number of ``width`` bits: 20 ternary codes fill 32 bits, 12 of base 5 fill 28, 11 of base 7 fill 31.
Units are built in 16 parallel lanes: code ``t`` of lane ``l`` of row ``k`` is coordinate ``(digits
k + t) 16 + l``. Each lane is a little-endian stream of its rows' units (row k at bit ``k width``),
cut into 32-bit words; word w of lane l is word ``16 w + l``. Codes after the last coordinate are 0.
"""

from __future__ import annotations

LANES = 16


def row_coordinates(digits: int) -> int:
    """Return the coordinates of one row of units."""
    return LANES * digits


def packed_words(coordinates: int, digits: int, width: int) -> int:
    """Return the 32-bit words that ``coordinates`` codes occupy."""
    rows = -(-coordinates // row_coordinates(digits))
    return LANES * -(-rows * width // 32)
