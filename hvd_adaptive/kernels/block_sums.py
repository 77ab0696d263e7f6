"""What an encoder knows of a payload's checksum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BlockSums:
    """Sums of some blocks of a body, made while they lay in the cache.

    size: of the body, in bytes, for ``body[:sums]``.  sums: uint32 (constants.CHECK_LANES,).
    summed: int64 (2 k,): the first block and the end of each of k ascending runs of them.
    """

    size: int
    sums: np.ndarray
    summed: np.ndarray

    def __index__(self) -> int:
        return self.size
