"""Compute the parameter and sizes of the Rice code of sparse coordinates.

The loops are in kernels/. A kept coordinate is coded as its gap, the number of coordinates dropped
since the last kept one: the quotient gap >> k as that many zeros and a one, then the k low bits of
the gap. If the value is sent in full precision, a bit 1 follows, else a bit 0 and the sign (1 is
negative). The stream is little-endian in 32-bit words, the first bit lowest; zeros fill the last
word.
"""

from __future__ import annotations

import math

# A code without its quotient must fit in 32 bits.
LARGEST_PARAMETER = 29


def rice_parameter(density: float) -> int:
    """Return the k with the fewest bits for gaps between independently kept coordinates.

    Source: Kiely, Selecting the Golomb parameter in Rice coding (2004), Eq. 8.

    Args:
        density: Probability that a coordinate is kept, 0 to 1.
    """
    if density >= 1:
        return 0
    golden = (1 + math.sqrt(5)) / 2
    best = math.log(math.log(golden - 1) / math.log1p(-density), 2)
    return min(LARGEST_PARAMETER, max(0, 1 + math.floor(best)))


def most_words(coordinates: int, k: int) -> int:
    """Return the most 32-bit words of a stream: every coordinate kept, every quotient bit used."""
    return -(-(coordinates * (k + 3) + (coordinates >> k)) // 32)
