"""Define the buckets, tables and signs of EDEN's rotated quantisation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.fixed import packed_words
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.streams import Inside

# Rotated coordinates of a partial bucket are a multiple of this: packing fills up to it anyway.
STEP = 64
# A hash has the signs of 32 coordinates that are this far apart, so that loops over neighbours run
# in vector registers. Coordinate j has bit j // APART % 32 of hash (j // SPAN) APART + j % APART.
APART = 128
SPAN = 32 * APART
# Levels of more bits than this are as close as the sums of signs that one-hot buckets become, so
# that one more shared rotation is needed.
MOST_BITS_ROTATED_ONCE = 4


@dataclass(frozen=True)
class Buckets:
    """Describe the buckets of ``coordinates`` coordinates: ``size`` each, the last one shorter."""

    coordinates: int
    size: int

    @property
    def whole(self) -> int:
        return self.coordinates // self.size

    @property
    def rest(self) -> int:
        return self.coordinates % self.size

    @property
    def last(self) -> int:
        """Return the rotated coordinates of the partial bucket."""
        return -(-self.rest // STEP) * STEP

    @property
    def count(self) -> int:
        return self.whole + (self.rest > 0)

    @property
    def codes(self) -> int:
        return self.whole * self.size + self.last


@dataclass(frozen=True)
class Sections:
    """Divide buckets among sections of one width each: places in ``numbers`` and words.

    Attributes:
        numbers: Buckets that have codes, by width and then ascending: int64.
        ends: The place after the last one of each width, 1, 2, ...: int64.
        words: The words of each width's section.
    """

    numbers: np.ndarray
    ends: np.ndarray
    words: tuple[int, ...]

    @classmethod
    def of(cls, widths: np.ndarray, buckets: Buckets, most: int) -> Sections:
        """Return the sections of buckets of these widths, 0 to ``most`` (int64 (buckets,))."""
        order = np.argsort(widths, kind="stable")
        begins = np.searchsorted(widths[order], np.arange(1, most + 2))
        numbers, ends = order[begins[0] :], begins[1:] - begins[0]
        words, first = [], 0
        short = buckets.count * buckets.size - buckets.codes
        for bits, end in enumerate(ends.tolist(), 1):
            codes = (end - first) * buckets.size
            if end > first and numbers[end - 1] == buckets.count - 1:
                codes -= short
            words.append(packed_words(codes, bits))
            first = end
        return cls(numbers, ends, tuple(words))

    def parts(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield bits, places and words of each section that is not empty."""
        first = at = 0
        for bits, (end, words) in enumerate(zip(self.ends.tolist(), self.words, strict=True), 1):
            if end > first:
                yield bits, slice(first, end), slice(at, at + words)
            first, at = end, at + words


@dataclass(frozen=True, eq=False)
class Levels:
    """Hold levels of N(0, 1), ascending, and the thresholds between them: float32.

    share: the part of a bucket's rotated coordinates that have codes, the first ones. Their number
    is a multiple of ``STEP``.
    """

    bits: int
    thresholds: np.ndarray
    values: np.ndarray
    share: float = 1.0

    @classmethod
    def of(cls, levels: np.ndarray, share: float = 1.0) -> Levels:
        """Return float32 levels and their thresholds."""
        thresholds = ((levels[1:] + levels[:-1]) / 2).astype(np.float32)
        return cls((len(levels) - 1).bit_length(), thresholds, levels.astype(np.float32), share)

    def kept(self, length: int) -> int:
        """Return how many of ``length`` rotated coordinates of a bucket have codes."""
        return -(-int(length * self.share) // STEP) * STEP

    def codes(self, coordinates: int, size: int) -> int:
        """Return the codes of so many rotated coordinates in buckets of ``size``."""
        whole, rest = divmod(coordinates, size)
        return whole * self.kept(size) + self.kept(rest)


class Widths:
    """Hold levels of 1, 2, ... bits, for buckets that have different numbers of bits.

    Args:
        levels: Levels by their bits.

    Attributes:
        positive: Their positive thresholds, float32 (most bits, at least 8), infinite beyond the
            last. Row b - 1 is of b bits.
        sizes: Their positive levels, likewise, 0 beyond the last.
        values: All levels, float32 (most bits, at least 16): level c of b bits is also at every
            c + k 2**b.
    """

    def __init__(self, levels: Mapping[int, Levels]) -> None:
        self.levels = dict(levels)
        self.most = max(self.levels)
        half = max(8, 1 << (self.most - 1))
        self.positive = np.full((self.most, half), np.inf, dtype=np.float32)
        self.sizes = np.zeros((self.most, half), dtype=np.float32)
        self.values = np.zeros((self.most, 2 * half), dtype=np.float32)
        for bits, own in self.levels.items():
            count = 1 << (bits - 1)
            self.positive[bits - 1, : count - 1] = own.thresholds[count:]
            self.sizes[bits - 1, :count] = own.values[count:]
            self.values[bits - 1] = np.resize(own.values, 2 * half)


def with_widths(scales: np.ndarray, bits: int) -> np.ndarray:
    """Return scales whose three lowest bits are ``bits`` - 1: the nearest such float32, (buckets,).

    They differ from ``scales`` by at most four units in the last place.
    """
    whole = scales.view(np.int32) - (bits - 1)
    return ((whole + 4 & ~7) + (bits - 1)).astype(np.int32).view(np.float32)


def widths_of(scales: np.ndarray) -> np.ndarray:
    """Return the widths that ``with_widths`` has set, int64; 0 of scales that are 0 or not finite.

    Any scales that were received have widths.
    """
    widths = 1 + (scales.view(np.int32) & 7).astype(np.int64)
    return np.where(np.isfinite(scales) & (scales != 0), widths, 0)


def shared_streams(rotation: int, bits: int) -> list[int]:
    """Return the streams of the shared rotations' signs, in the order of the encoder."""
    more = [stream_key(rotation, Inside.AGAIN)] if bits > MOST_BITS_ROTATED_ONCE else []
    return [rotation, *more]


def block_order(length: int) -> int:
    """Return the order of the Hadamard matrices that rotate ``length`` coordinates: the largest
    power of two within."""
    return 1 << (length.bit_length() - 1)


def root_of(length: int) -> float:
    """Return the factor of H, which is 1 where H is applied in two parts, each with its own."""
    return length**-0.5 if block_order(length) == length else 1.0


def power_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that bring buckets' largest coordinates into [2, 4)."""
    exponent = (largest.view(torch.int32) >> 23).clamp(1, 254)
    return ((255 - exponent) << 23).view(torch.float32)


def finished_scales(
    largest: torch.Tensor,
    norms: torch.Tensor,
    products: torch.Tensor,
    length: int,
    rotations: int,
) -> torch.Tensor:
    """Return S = ‖y‖²/⟨y, q⟩ of buckets of one length, float32 (buckets,).

    Args:
        largest: Their largest magnitudes; 0 or NaN of those that have no codes.
        norms: ‖y‖ of the rotated buckets, without the factors of H, times ``power_of``.
        products: ⟨y, q⟩ likewise.
        length: Rotated coordinates of a bucket.
        rotations: How many rotations y has had.
    """
    weight = float(length) ** (-rotations / 2) if block_order(length) == length else 1.0
    scales = norms * norms / products * weight / power_of(largest)
    scales = torch.where(scales < SMALLEST_NORM, torch.zeros_like(scales), scales)
    scales = torch.where(torch.isfinite(scales), scales, torch.nan)
    return torch.where(largest > 0, scales, torch.where(largest == 0, 0.0, torch.nan))
