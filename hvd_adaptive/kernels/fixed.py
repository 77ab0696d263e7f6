"""Compute the sizes of fixed-width packing of b-bit codes in 32-bit words.

The loops are in kernels/. Codes are packed in blocks of 512 coordinates, so that 16 vector lanes
work in parallel. Coordinate ``i`` of a block is in quarter ``q = i // 128``, row ``k = i % 128 //
16`` and lane ``i % 16``. Each lane is a little-endian stream of 8 rows of 4 codes (row k, quarter q
at bit ``(4 k + q) b``), cut into b words; word w of lane l is word ``16 w + l`` of the block. A
last, partial block has ``ceil(rest / 64)`` rows, quarters of that many rows, and the fewest words
that hold them.
"""

from __future__ import annotations

BLOCK = 512
LANES = 16
QUARTERS = 4
ROWS = 8
# Number of coordinates of a quarter of a block.
QUARTER = ROWS * LANES


def partial_rows(rest: int) -> int:
    """Return the rows of a partial block of ``rest`` coordinates."""
    return -(-rest // (QUARTERS * LANES))


def packed_words(coordinates: int, bits: int) -> int:
    """Return the 32-bit words of ``coordinates`` codes of ``bits`` bits."""
    blocks, rest = divmod(coordinates, BLOCK)
    tail = -(-partial_rows(rest) * QUARTERS * bits // 32)
    return (blocks * bits + tail) * LANES
