"""Hold the part of a payload's checksum that an encoder has computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BlockSums:
    """Hold sums of some blocks of a body, computed while the blocks lay in the cache.

    size: of the body, in bytes, for ``body[:sums]``.  sums: uint32 (constants.CHECK_LANES,).
    summed: int64 (2 k,): the first block and the end of each of k ascending runs of blocks.
    """

    size: int
    sums: np.ndarray
    summed: np.ndarray

    def __index__(self) -> int:
        return self.size
