"""Define numbers that the kernels of all backends share, and the record of a part of a checksum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MASK32 = 0xFFFFFFFF

# Norms: lanes of the summation tree, and the least norm that counts as one.
NORM_LANES = 32
SMALLEST_NORM = 2.0**-126

# Histograms: log-spaced bins, the first of which are coarse.
BINS, COARSE_BINS = 1664, 128

# Checksums: words of a block, its lanes, two odd multipliers.
CHECK_LANES, CHECK_BLOCK = 64, 4096
CHECK_A, CHECK_B = 0x9E3779B1, 0x85EBCA77
# A payload's header (coding/header.py): its length in bytes, and where the checksum is in it.
HEADER_BYTES, CHECKSUM_AT = 96, 12

# Streams of segments: an end is 32 bits. A longer stream travels uncoded.
LAST_END = 2**32 - 1

# Natural compression: bits of float32 infinity, of the largest finite float32 and of a NaN.
INFINITE, LARGEST, NAN = 0x7F800000, 0x7F7FFFFF, 0x7FC00000

# Levels of a bucket. symmetric_levels: 2 |slope| width <= TOLERANCE * spread bounds the loss by
# that share of the objective; a spread of NEGLIGIBLE * squares is rounding.
TOLERANCE, NEGLIGIBLE = 0.01, 1e-12
# Slopes of symmetric_level's first bracket over sum |v|: their signs are certain, and a Gaussian's
# sizes make the first step.
START_LOW, START_HIGH = -0.42, 0.27
MOST_PASSES = 64


@dataclass(frozen=True)
class BlockSums:
    """Hold sums of some blocks of a body that an encoder computed while they lay in the cache.

    size: of the body, in bytes, for ``body[:sums]``.  sums: uint32 (CHECK_LANES,).
    summed: int64 (2 k,): the first block and the end of each of k ascending runs of blocks.
    """

    size: int
    sums: np.ndarray
    summed: np.ndarray

    def __index__(self) -> int:
        return self.size
