"""Define the payload checksum's numbers, and the record of a part of a checksum.

reference/checksum.py computes the checksum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Words of a block, its lanes, two odd multipliers.
BLOCK, LANES = 4096, 64
A, B = 0x9E3779B1, 0x85EBCA77
# A payload's header (coding/header.py): its length in bytes, and where the checksum is in it.
HEADER_BYTES, CHECKSUM_AT = 96, 12


@dataclass(frozen=True)
class BlockSums:
    """Hold sums of some blocks of a body that an encoder computed while they lay in the cache.

    Encoders for the CPU return them if ``summing`` is True, and ``seal`` then need not read these
    blocks. All other encoders return None.

    size: of the body, in bytes, for ``body[:sums]``.  sums: uint32 (LANES,).
    summed: int64 (2 k,): the first block and the end of each of k ascending runs of blocks.
    """

    size: int
    sums: np.ndarray
    summed: np.ndarray

    def __index__(self) -> int:
        return self.size
