"""Rice coding of sparse coordinates: gaps between indices, and what each coordinate is (sizes; the
loops are in kernels/).

A kept coordinate is coded as its gap, the number of coordinates left out since the last kept one:
the quotient gap >> k as so many zeros and a one, then the k low bits of the gap. A bit 1 follows
where the value travels in full, else a bit 0 and the sign (1 is negative). The stream is
little-endian in 32-bit words, the first bit lowest; zeros fill the last word.
"""

from __future__ import annotations

import math

# A code without its quotient must fit 32 bits.
LARGEST_PARAMETER = 29


def rice_parameter(density: float) -> int:
    """k of fewest bits for gaps between coordinates that are kept with probability ``density``
    (0 to 1), independently: Kiely, Selecting the Golomb parameter in Rice coding (2004), Eq. 8."""
    if density >= 1:
        return 0
    golden = (1 + math.sqrt(5)) / 2
    best = math.log(math.log(golden - 1) / math.log1p(-density), 2)
    return min(LARGEST_PARAMETER, max(0, 1 + math.floor(best)))


def most_words(coordinates: int, k: int) -> int:
    """32-bit words that a stream can take: every coordinate kept, every quotient bit used."""
    return -(-(coordinates * (k + 3) + (coordinates >> k)) // 32)
