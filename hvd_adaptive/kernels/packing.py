"""Define how codes are packed into 32-bit words, as docs/wire_format.md describes ("Packed codes").

The loops are in the backends. Codes are packed in 16 lanes, so that as many vector lanes work in
parallel. Each lane is a stream of units of ``width`` bits, one for each row. With fixed width a
unit has the codes of the four quarters of a block of 512 coordinates; else it is one number of
``digits`` codes: 20 ternary codes fill 32 bits, 12 of base 5 fill 28, 11 of base 7 fill 31.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

BLOCK = 512
LANES = 16
QUARTERS = 4
ROWS = 8
# Number of coordinates of a quarter of a block.
QUARTER = ROWS * LANES
# Codes share a number if whole bits per code exceed log2 of the alphabet by more than this factor.
ROOM = 1.03


class Packing(NamedTuple):
    """Pack ``digits`` codes into a unit of ``width`` bits: alphabet**digits <= 2**width. digits = 1
    is fixed width, more is radix packing.
    """

    alphabet: int
    digits: int
    width: int

    @property
    def bits_per_code(self) -> float:
        """Return the bits of a code, which need not be whole."""
        return self.width / self.digits

    def words(self, coordinates: int) -> int:
        """Return the 32-bit words that ``coordinates`` codes occupy."""
        if self.digits == 1:
            blocks, rest = divmod(coordinates, BLOCK)
            tail = -(-partial_rows(rest) * QUARTERS * self.width // 32)
            return (blocks * self.width + tail) * LANES
        rows = -(-coordinates // (LANES * self.digits))
        return LANES * -(-rows * self.width // 32)


def partial_rows(rest: int) -> int:
    """Return the rows of a partial block of ``rest`` coordinates."""
    return -(-rest // (QUARTERS * LANES))


@functools.cache
def packing_of(alphabet: int) -> Packing:
    """Return the packing of an alphabet of 2 to 256 codes.

    Fixed width is chosen if it wastes at most 3 %. Otherwise the unit of at most 32 bits with the
    least waste is chosen, or a whole word if it is within 1 % of log2 of the alphabet, since it
    needs no shifts.

    Among the odd alphabets up to 255, which are those of level tables, only 109, 111, 129, 131 and
    217 stay above 3 % (at most 3.5): their units of four digits narrowly exceed a whole bit.
    """
    if not 2 <= alphabet <= 256:
        raise ValueError(f"alphabet={alphabet!r}: must be an integer from 2 to 256")
    least = math.log2(alphabet)
    width = (alphabet - 1).bit_length()
    if width <= ROOM * least:
        return Packing(alphabet, 1, width)
    units = [
        Packing(alphabet, digits, (alphabet**digits - 1).bit_length())
        for digits in range(1, int(32 / least) + 1)
    ]
    word = units[-1]
    if word.width == 32 and word.bits_per_code <= 1.01 * least:
        return word
    return min(units, key=lambda unit: (unit.bits_per_code, -unit.digits))


# This is the packing of signs, and of the sides of a bucket.
ONE_BIT = Packing(alphabet=2, digits=1, width=1)


def check_sections(
    payloads: Iterable[tuple[torch.Tensor, torch.Tensor]], name: str, count: int, words: int
) -> None:
    """Raise ValueError if a payload has less than ``count`` rows, called ``name``, or ``words``."""
    for rows, packed in payloads:
        if len(rows) < count or packed.numel() < words:
            sizes = f"{len(rows)} {name} and {packed.numel()} words"
            raise ValueError(f"payload of {sizes} is too short")


def check_words(words: torch.Tensor, packing: Packing, codes: torch.Tensor) -> None:
    """Raise ValueError if ``words`` (int32) are too few for ``codes`` (one for each coordinate)."""
    if words.numel() < packing.words(codes.numel()):
        raise ValueError(f"payload of {words.numel()} words is too short for {codes.numel()} codes")
