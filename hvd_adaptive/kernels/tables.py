"""Build level tables in the kernels' form: float32 thresholds and reconstruction values."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from hvd_adaptive.base.tensors import from_host
from hvd_adaptive.kernels.constants import BINS, COARSE_BINS
from hvd_adaptive.kernels.packing import Packing, packing_of

# A uniform number is an integer k below 2**24 and means (k + 1/2) / 2**24: the gaps carry the
# factor 2**-24, the starts the half.
UNIFORM_SCALE = np.float32(2.0**-24)
LARGEST_UNIFORM = np.float32(2**24 - 1)

# The search table has 128 cells an octave over 32 octaves: a cell is read off a float32's bits.
CELL_SHIFT = 16
CELL_BASE = (127 - 32) << 7
CELLS = 32 * 128 + 1

# log2(w) = e + t P(t) for w = 2**e (1 + t) and 1 + t from sqrt(1/2) to sqrt(2), within 3.5e-7: the
# coefficients minimise the largest error (Lawson's iteration), the first one is P(0).
HALF_BITS, MANTISSA_BITS = 0x3F3504F3, 0x007FFFFF
LOG2_COEFFICIENTS = (
    1.4426997,
    -0.7213759,
    0.48046502,
    -0.35896185,
    0.29726261,
    -0.2726979,
    0.17063443,
)
# Up to so many thresholds are compared with one by one, which is no slower.
_LEAST_EXPONENTIAL = 9


@dataclass(frozen=True, eq=False)
class KernelTable:
    """Hold a level table as arrays.

    A coordinate v of a bucket with norm N has r = abs(v)/N, one uniform integer k < 2**24, and an
    index m from 0 to ``thresholds``: the magnitude to which r is rounded (ALQ paper, section 3:
    h(r) is the upper level with probability rho(r)). Its code is ``c = base + m``, or
    ``alphabet - 1 - c`` if v < 0: the place of the level among all levels in ascending order. The
    code is decoded as ``values[code] * N``. ``rule`` defines m:

    "thresholds": m = sum_j [r > start[j] + k gap[j]].
    "uniform": with y = min(r, 1) slope + offset and i = floor(y),
        m = i + [y - i > (k + 1/2)/2**24].
    "exponential", ratio p: if r <= lower[1], as "thresholds" (one comparison); above it, for
        w = r / (1 + (1/p - 1)(k + 1/2)/2**24), m = floor(log2(w) / log2(1/p) + thresholds + 1),
        from 1 to ``thresholds``: r exceeds the threshold between p**(i+1) and p**i if and only if w
        exceeds p**(i+1).

    lower: float32 (thresholds,), the lower ends of the intervals
    start, gap: float32 (thresholds,), gap already multiplied by 2**-24
    numbers: float32 (4,), the rule's own: slope, offset | gain, first, 1/log2(1/p), thresholds + 1,
        where 1 + (1/p - 1)(k + 1/2)/2**24 = k gain + first
    values: float32 (alphabet,), and one more if codes of fixed width leave one over
    """

    packing: Packing
    rule: str
    lower: np.ndarray
    start: np.ndarray
    gap: np.ndarray
    numbers: np.ndarray
    base: int
    values: np.ndarray

    @property
    def alphabet(self) -> int:
        return self.packing.alphabet

    @property
    def thresholds(self) -> int:
        return len(self.start)

    @functools.cached_property
    def search(self) -> np.ndarray:
        """Return uint8 (CELLS,): bounds below r's interval, which ``corrections`` steps correct."""
        return np.searchsorted(self.lower[1:], _cell_edges()[:-1], side="left").astype(np.uint8)

    @functools.cached_property
    def corrections(self) -> int:
        above = np.searchsorted(self.lower[1:], _cell_edges()[1:], side="left")
        return int((above - self.search).max(initial=0))


def kernel_table(magnitudes: np.ndarray, symmetric: bool) -> KernelTable:
    """Build the arrays of a table of magnitudes that ascend to 1, from above 0 if ``symmetric``,
    else from 0.
    """
    magnitudes = np.asarray(magnitudes, dtype=np.float64)
    levels = magnitudes.astype(np.float32)
    if symmetric:
        lower, upper = np.concatenate([-levels[:1], levels[:-1]]), levels
        values = np.concatenate([-levels[::-1], levels])
    else:
        lower, upper = levels[:-1], levels[1:]
        values = np.concatenate([-levels[:0:-1], levels])
    start, gap = _thresholds(lower, upper)
    packing, alphabet = packing_of(len(values)), len(values)
    # A forged payload may hold codes of fixed width beyond the last.
    codes = 1 << packing.width if packing.digits == 1 else alphabet
    values = np.pad(values, (0, codes - alphabet), mode="edge")
    rule, numbers = "thresholds", np.zeros(4)
    if _is_uniform(magnitudes, symmetric):
        rule = "uniform"
        numbers[:2] = (alphabet - 1) / 2, 0.5 if symmetric else 0.0
        # The values are the same products as in a decoder that computes them.
        steps = np.arange(1 - alphabet, 2 * codes - alphabet, 2, dtype=np.float32)
        values = steps * np.float32(1 / (alphabet - 1))
    elif len(start) >= _LEAST_EXPONENTIAL and _is_exponential(magnitudes[0 if symmetric else 1 :]):
        rule = "exponential"
        ratio = magnitudes[-1] / magnitudes[-2]
        gain = (ratio - 1) * 2.0**-24
        numbers[:] = gain, 1 + gain / 2, 1 / np.log2(ratio), len(start) + 1
    base = alphabet - 1 - len(start)
    return KernelTable(packing, rule, lower, start, gap, numbers.astype(np.float32), base, values)


def room_of(packing: Packing) -> int:
    """Return more than the largest code that can be read: a power of two, and at least 16."""
    return max(16, 1 << (packing.alphabet - 1).bit_length())


def padded_values(values: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Pad rows to ``room_of`` a packing."""
    padded = values.new_full((values.shape[0], room_of(packing)), torch.nan)
    padded[:, : packing.alphabet] = values
    return padded


@functools.lru_cache(maxsize=64)
def interval_ends(table: KernelTable) -> np.ndarray:
    """Return the ends of the intervals between the levels around r, ascending: float32."""
    return np.append(table.lower, np.float32(1))


def histogram(bucket: torch.Tensor, scale: float) -> torch.Tensor:
    """Count r = abs(v)/scale in bins, int64 (1666,): log-spaced bins, the zeros, the ones. A device
    is not waited for.

    Bins 1 to 127 begin at 2**(-28 + k//8) * (1 + k%8 / 8), bins 128 + k at 2**(-12 + k//128) * (1 +
    k%128 / 128); bin 0 begins above zero. A NaN is in no bin.
    """
    r = bucket.abs() * (1.0 / torch.tensor(scale, dtype=torch.float32, device=bucket.device))
    bits = r.view(torch.int32)
    coarse = ((bits >> 20) - ((127 - 28) << 3)).clamp(min=0)
    index = torch.where(r < 2.0**-12, coarse, (bits >> 16) - ((127 - 12) << 7) + COARSE_BINS)
    index = torch.where(r == 0, BINS, torch.where(r >= 1, BINS + 1, index))
    number = ~r.isnan()
    index = torch.where(number, index, 0).to(torch.int64)
    return index.new_zeros(BINS + 2).scatter_add_(0, index, number.to(torch.int64))


def errors_of(
    flat: torch.Tensor, norms: torch.Tensor, bucket_size: int, table: KernelTable
) -> torch.Tensor:
    """Return for each bucket of ``flat`` (float32, (n,)) the expected squared error of rounding it
    without bias, and its squared L2 norm: float64 (buckets, 2).

    The error is norm**2 times the sum over coordinates of (u - r)(r - l), the variance of rounding
    r = abs(v)/norm to its neighbours l <= r <= u (ALQ paper, Eqs 1, 2). It is 0 if the norm is 0,
    NaN if the norm is NaN. The function does not wait for the result. norms: float32 (buckets,).

    Kernels for CPU tensors compute the same sums in the same order: ranks choose bits by them
    (codec/second_stage.py), and must choose alike.
    """
    ends = _ends(table, flat.device)
    padded = flat.new_zeros(len(norms) * bucket_size)
    padded[: flat.numel()] = flat
    rows, wide = padded.view(len(norms), bucket_size), norms.to(torch.float64)
    r = (rows.abs() * (1 / wide[:, None])).clamp(max=1).to(torch.float32).to(torch.float64)
    index = torch.bucketize(r, ends[1:-1])
    variance = (ends[index + 1] - r) * (r - ends[index])
    # The last bucket may be shorter than its padded length.
    places = torch.arange(padded.numel(), device=flat.device).view(r.shape)
    variance = torch.where(places < flat.numel(), variance, 0.0)
    terms = torch.stack([variance, rows.to(torch.float64).square()])
    # On the host a cumulative sum adds one term after the other. On a GPU it is not deterministic.
    sums = terms.cumsum(dim=2)[..., -1] if flat.device.type == "cpu" else terms.sum(dim=2)
    error = torch.where(norms == 0, 0.0, sums[0] * wide.square())
    return torch.stack([error, sums[1]], dim=1)


@functools.lru_cache(maxsize=64)
def _ends(table: KernelTable, device: torch.device) -> torch.Tensor:
    return from_host(torch.from_numpy(interval_ends(table)).to(torch.float64), device)


def _is_uniform(magnitudes: np.ndarray, symmetric: bool) -> bool:
    signed = np.concatenate([-magnitudes[:1], magnitudes]) if symmetric else magnitudes
    gaps = np.diff(signed)
    return bool(np.allclose(gaps, gaps[-1], rtol=1e-12, atol=0))


def _is_exponential(positive: np.ndarray) -> bool:
    ratios = positive[1:] / positive[:-1]
    return bool(np.allclose(ratios, ratios[-1], rtol=1e-9, atol=0) and ratios[-1] > 1 + 2.0**-13)


def _thresholds(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and gaps such that lower <= start + k * gap <= upper in float32, for any k:
    counting thresholds below r and searching r's interval then give the same index.
    """
    gaps = (upper - lower) * UNIFORM_SCALE
    start = lower + gaps * np.float32(0.5)
    for _ in range(4):
        over = start + gaps * LARGEST_UNIFORM > upper
        gaps = np.where(over, np.nextafter(gaps, np.float32(0)), gaps)
    return start.astype(np.float32), gaps.astype(np.float32)


@functools.cache
def _cell_edges() -> np.ndarray:
    """Return the search cells' edges; the first cell starts below every r, the last has no end."""
    bits = (np.arange(CELLS + 1, dtype=np.int64) + CELL_BASE) << CELL_SHIFT
    edges = bits.astype(np.uint32).view(np.float32).copy()
    edges[0], edges[-1] = -1.0, np.inf
    return edges
