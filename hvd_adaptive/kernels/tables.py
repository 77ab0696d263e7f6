"""Level tables in the form that the kernels read: float32 thresholds and reconstruction values."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

# A uniform number is an integer k below 2**24 and stands for (k + 1/2) / 2**24: the gaps carry the
# factor 2**-24, the starts the half.
UNIFORM_SCALE = np.float32(2.0**-24)
LARGEST_UNIFORM = np.float32(2**24 - 1)

# The search table has 32 cells an octave over 32 octaves: a cell is read off a float32's bits.
CELL_SHIFT = 18
CELL_BASE = (127 - 32) << 5
CELLS = 32 * 32 + 1


@dataclass(frozen=True, eq=False)
class KernelTable:
    """A level table as arrays.

    The magnitude index of r = abs(v)/norm is ``m = sum_j [r > start[j] + k * gap[j]]`` with one
    uniform integer k < 2**24 per coordinate (ALQ paper, section 3: h(r) is the upper level with
    probability rho(r)); the code is ``(base + m) ^ (negative if v < 0 else 0)``; it stands for
    ``values[code] * norm``.

    lower: float32 (thresholds,), the lower ends of the intervals
    start, gap: float32 (thresholds,), gap already multiplied by 2**-24
    values: float32 (2**bits,)
    search: uint32 (CELLS,), a lower bound of the interval of r; ``corrections`` steps mend it
    """

    bits: int
    lower: np.ndarray
    start: np.ndarray
    gap: np.ndarray
    base: int
    negative: int
    values: np.ndarray

    @property
    def thresholds(self) -> int:
        return len(self.start)

    @functools.cached_property
    def search(self) -> np.ndarray:
        return np.searchsorted(self.lower[1:], _cell_edges()[:-1], side="left").astype(np.uint32)

    @functools.cached_property
    def corrections(self) -> int:
        above = np.searchsorted(self.lower[1:], _cell_edges()[1:], side="left")
        return int((above - self.search).max(initial=0))


def kernel_table(magnitudes: np.ndarray, bits: int, symmetric: bool) -> KernelTable:
    """Build the arrays of a table given by its ascending magnitudes, the last of which is 1.

    ``symmetric``: 2**(bits-1) positive magnitudes, codes ascend from -1 to +1 (ALQ paper, App.
    B.3). Otherwise the first magnitude is 0 and a code is a magnitude index and a sign bit.
    """
    levels = np.asarray(magnitudes, dtype=np.float32)
    half = 1 << (bits - 1)
    if symmetric:
        lower, upper = np.concatenate([-levels[:1], levels[:-1]]), levels
        values = np.concatenate([-levels[::-1], levels])
        base, negative = half - 1, 2 * half - 1
    else:
        lower, upper = levels[:-1], levels[1:]
        padded = np.concatenate([levels, np.full(half - len(levels), levels[-1], np.float32)])
        values = np.concatenate([padded, -padded])
        base, negative = 0, half
    start, gap = _thresholds(lower, upper)
    return KernelTable(bits, lower, start, gap, base, negative, values)


def _thresholds(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and gaps such that lower <= start + k * gap <= upper in float32, for any k.

    Then counting thresholds below r and searching r's interval give the same index.
    """
    gaps = (upper - lower) * UNIFORM_SCALE
    start = lower + gaps * np.float32(0.5)
    for _ in range(4):
        over = start + gaps * LARGEST_UNIFORM > upper
        gaps = np.where(over, np.nextafter(gaps, np.float32(0)), gaps)
    return start.astype(np.float32), gaps.astype(np.float32)


@functools.cache
def _cell_edges() -> np.ndarray:
    """Edges of the search cells; the first cell starts below every r, the last has no end."""
    bits = (np.arange(CELLS + 1, dtype=np.int64) + CELL_BASE) << CELL_SHIFT
    edges = bits.astype(np.uint32).view(np.float32).copy()
    edges[0], edges[-1] = -1.0, np.inf
    return edges
