"""Define BucketCodec, whose buckets have their own levels: a body of levels and codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.checks import check_choice
from hvd_adaptive.codec.adaptive_codec import PlainCodec
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.settings import Settings

# A float16 has 10 bits of mantissa, a float32 23.
_DROPPED = (1 << 13) - 1
_MAGNITUDE = 0x7FFFFFFF
# A level below 2**(exponent of the largest - 27) is rounded to that or to 0. Scaled by 2**(14 -
# exponent), all others are normal float16 numbers.
_REACH = 27
_TOP = 14


class Float32Levels:
    """Store rows of float32 numbers."""

    name = "float32"

    def section_bytes(self, buckets: int, numbers: int) -> int:
        """Return the bytes of the section of all buckets' levels, a multiple of 4."""
        return 4 * buckets * numbers

    def rounded(self, levels: torch.Tensor) -> torch.Tensor:
        """Return levels (float32, each row ascending) as the receiver decodes them."""
        return levels

    def write(self, levels: torch.Tensor, section: torch.Tensor) -> None:
        """Write ``rounded`` levels into a section (uint8)."""
        section.view(torch.float32).copy_(levels.reshape(-1))

    def read(self, section: torch.Tensor, buckets: int, numbers: int) -> torch.Tensor:
        """Return the levels of a section, float32 (buckets, numbers)."""
        return section.view(torch.float32).view(buckets, numbers)


class Float16Levels:
    """Store rows of float16 numbers, then an int8 exponent for each bucket.

    With exponent e a level is number 2**(e - 14), and 2**e <= the largest magnitude < 2**(e+1), so
    no gradient is too small or too large for float16. The first level is rounded down, the last one
    up, and the others to the nearest. So every coordinate stays between two levels, and random
    rounding stays unbiased. A bucket whose extremes leave the range of float32 becomes NaN.
    """

    name = "float16"

    def section_bytes(self, buckets: int, numbers: int) -> int:
        return -(-buckets * (2 * numbers + 1) // 4) * 4

    def rounded(self, levels: torch.Tensor) -> torch.Tensor:
        magnitude = levels.view(torch.int32) & _MAGNITUDE
        toward, away = magnitude & ~_DROPPED, (magnitude + _DROPPED) & ~_DROPPED
        nearest = (magnitude + (_DROPPED + 1) // 2) & ~_DROPPED
        least = _power(_exponents(levels) - _REACH).to(torch.float32)
        zero = torch.zeros_like(levels)
        small = levels.abs() < least
        toward = torch.where(small, zero, toward.view(torch.float32))
        away = torch.where(small & (levels != 0), least, away.view(torch.float32))
        out = torch.where(small, zero, nearest.view(torch.float32))
        negative = levels < 0
        out[:, 0] = torch.where(negative, away, toward)[:, 0]
        out[:, -1] = torch.where(negative, toward, away)[:, -1]
        out = torch.where(negative, -out, out)
        return torch.where(torch.isfinite(out).all(dim=1, keepdim=True), out, torch.nan)

    def write(self, levels: torch.Tensor, section: torch.Tensor) -> None:
        exponents = _exponents(levels)
        halves = levels.to(torch.float64) * _power(_TOP - exponents)
        split = 2 * levels.numel()
        section[:split].view(torch.float16).copy_(halves.to(torch.float16).reshape(-1))
        section[split:].zero_()
        section[split : split + exponents.numel()].view(torch.int8).copy_(exponents)

    def read(self, section: torch.Tensor, buckets: int, numbers: int) -> torch.Tensor:
        split = 2 * buckets * numbers
        halves = section[:split].view(torch.float16).view(buckets, numbers)
        exponents = section[split : split + buckets].view(torch.int8).to(torch.int32)
        return (halves.to(torch.float64) * _power(exponents - _TOP)).to(torch.float32)


FORMATS = {form.name: form for form in (Float32Levels(), Float16Levels())}


def _exponents(levels: torch.Tensor) -> torch.Tensor:
    """Return the exponent of each row's largest magnitude, int32; 0 for rows of zeros or NaN."""
    largest = torch.maximum(levels[:, 0].abs(), levels[:, -1].abs())
    exponents = (largest.view(torch.int32) >> 23) - 127
    return torch.where((largest > 0) & torch.isfinite(largest), exponents, 0)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2**exponents as a column, exact, float64."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64).unsqueeze(1)


class BucketCodec(PlainCodec):
    """Base of codecs that quantise each bucket to levels computed from its own coordinates.

    The body holds ``numbers`` numbers of ``level_dtype`` for each bucket, from which a receiver
    computes its ``alphabet`` levels, then the codes' 32-bit words (kernels/packing.py). A codec
    defines ``name``, ``codec_settings`` and ``quantize_buckets``.
    """

    alphabet = 0  # until the constructor has set it

    def __init__(
        self, settings: Settings, alphabet: int, numbers: int, level_dtype: str = "float32"
    ) -> None:
        self.level_dtype = check_choice("level_dtype", level_dtype, tuple(FORMATS))
        self.alphabet, self._numbers = alphabet, numbers
        self._format = FORMATS[self.level_dtype]
        self._packing = packing_of(alphabet)
        super().__init__(settings)

    @abstractmethod
    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        """Fill ``words`` with the codes; return the buckets' numbers, float32 (buckets, ...)."""

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the buckets' levels (float32): their numbers, or -b and b if there is one."""
        return numbers if self._numbers > 1 else torch.cat([-numbers, numbers], dim=1)

    def body_bytes(self, coordinates: int) -> int:
        return self._level_bytes(coordinates) + 4 * self._packing.words(coordinates)

    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> None:
        at = self._level_bytes(flat.numel())
        words = body[at:].view(torch.int32)
        numbers = self.quantize_buckets(flat, words, self._bucket(flat.numel()), key)
        self._format.write(numbers, body[:at])

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        at, buckets, pairs = self._level_bytes(out.numel()), self._buckets(out.numel()), []
        for body in bodies:
            numbers = self._format.read(body[:at], buckets, self._numbers)
            pairs.append((self.values(numbers), body[at:].view(torch.int32)))
        decode = kernels.for_device(out.device, "bucket").decode_add
        decode(pairs, self._bucket(out.numel()), factor, out)

    def _level_bytes(self, coordinates: int) -> int:
        return self._format.section_bytes(self._buckets(coordinates), self._numbers)
