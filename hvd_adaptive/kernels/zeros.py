"""Define the code of the places of exact zeros: lengths of runs, in a Rice code, as
docs/wire_format.md describes ("Zeros").

A number m >= 1, a run's gap or length, is coded as its quotient (m - 1) >> k and the k low bits of
m - 1. k is the largest number with 3 · 2**k · runs <= 2 · total, or 0, where total is the number of
zeros, or the number of other coordinates and 1. So 2**k is about ln 2 times the mean, the best
parameter for runs of independent zeros (Kiely, Selecting the Golomb parameter in Rice coding,
2004). A code of ``runs`` numbers takes at most runs · (k + 1) + (total - runs) / 2**k bits, and
this is at most ``total``: with k = 0 the sides are equal, and otherwise the mean is at least 3 ·
2**(k - 1). The stream of n coordinates therefore has at most n + 1 bits.
"""

from __future__ import annotations

from typing import NamedTuple


class Runs(NamedTuple):
    """Numbers that a reader of a stream must know: of the vector's coordinates, of zeros among
    them, and of runs of zeros, at least 1 each.
    """

    coordinates: int
    zeros: int
    runs: int

    @property
    def others(self) -> int:
        """Return the number of coordinates that are not zero."""
        return self.coordinates - self.zeros

    @property
    def gap_bits(self) -> int:
        """Return the k of gaps."""
        return _parameter(self.others + 1, self.runs)

    @property
    def length_bits(self) -> int:
        """Return the k of lengths."""
        return _parameter(self.zeros, self.runs)

    @property
    def are_possible(self) -> bool:
        """Return whether a vector can have so many zeros and runs."""
        return 1 <= self.runs <= min(self.zeros, self.others + 1)


def most_stream_bytes(coordinates: int) -> int:
    """Return the most bytes of a stream, a multiple of 8."""
    return -(-(coordinates + 1) // 64) * 8


def mask_bytes(coordinates: int) -> int:
    """Return the bytes of a mask: a bit for each coordinate, 1 if it is not zero."""
    return -(-coordinates // 64) * 8


def _parameter(total: int, runs: int) -> int:
    return max(0, (2 * total // (3 * runs)).bit_length() - 1)
