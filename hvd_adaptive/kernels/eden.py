"""Define the buckets, tables and signs of EDEN's rotated quantisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hvd_adaptive.kernels import hadamard
from hvd_adaptive.kernels.constants import SMALLEST_NORM
from hvd_adaptive.kernels.random import Inside, stream_key

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


def shared_streams(rotation: int, bits: int) -> list[int]:
    """Return the streams of the shared rotations' signs, in the order of the encoder."""
    more = [stream_key(rotation, Inside.AGAIN)] if bits > MOST_BITS_ROTATED_ONCE else []
    return [rotation, *more]


def block_order(length: int) -> int:
    """Return the largest power of two within ``length``: the order of its Hadamard matrices."""
    return 1 << (length.bit_length() - 1)


def weight_of(length: int, rotations: int = 1) -> float:
    """Return the factors of H that rotations leave out; both parts of a split H have their own."""
    return float(length) ** (-rotations / 2) if block_order(length) == length else 1.0


def rotate(y: torch.Tensor, flip: Callable[[int], None], back: bool) -> None:
    """Flip the signs of rows and multiply them by H in place, without its factor, if their length
    is a power of two; if ``back``, undo this.

    Otherwise, twice: flip, apply H m**-0.5 of the largest power of two m to the first m
    coordinates, flip, apply it to the last m, and move all on by m²/length in a circle. The first m
    then have their fair share of what the first H has left alone, and of the rest.

    Args:
        flip: Gives y the signs of its buckets' numbers plus 0, ..., 3. A partial bucket is the last
            one, so that no other has these.
    """
    length = y.shape[1]
    m = block_order(length)
    rest, shift = length - m, m * m // length
    turns = range(4 if rest else 1)
    for turn in reversed(turns) if back else turns:
        part = y[:, turn % 2 * rest :][:, :m]
        if back and turn % 2:
            y.copy_(y.roll(-shift, 1))
        if not back:
            flip(turn)
        part.copy_(hadamard.transform(part, m) * (m**-0.5 if rest else 1.0))
        if back:
            flip(turn)
        elif turn % 2:
            y.copy_(y.roll(shift, 1))


def power_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that bring buckets' largest coordinates into [2, 4)."""
    exponent = (largest.view(torch.int32) >> 23).clamp(1, 254)
    return ((255 - exponent) << 23).view(torch.float32)


def finished_scales(
    largest: torch.Tensor, norms: torch.Tensor, products: torch.Tensor, weight: float | torch.Tensor
) -> torch.Tensor:
    """Return S = ‖y‖²/⟨y, q⟩ of buckets, float32 (buckets,).

    Args:
        largest: Their largest magnitudes; 0 or NaN of those that have no codes.
        norms: ‖y‖ of the rotated buckets, without the factors of H, times ``power_of``.
        products: ⟨y, q⟩ likewise.
        weight: ``weight_of`` the rotations that y has had.
    """
    scales = norms * norms / products * weight / power_of(largest)
    scales = torch.where(scales < SMALLEST_NORM, torch.zeros_like(scales), scales)
    scales = torch.where(torch.isfinite(scales), scales, torch.nan)
    return torch.where(largest > 0, scales, torch.where(largest == 0, 0.0, torch.nan))
