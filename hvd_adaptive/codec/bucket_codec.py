"""Define BucketCodec, whose buckets have their own levels: a body of levels and codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType

import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.checks import check_choice
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.coding.bucket_levels import FORMATS
from hvd_adaptive.kernels.packing import packing_of
from hvd_adaptive.settings import Settings


class BucketCodec(Codec):
    """Base of codecs that quantise each bucket to levels computed from its own coordinates.

    The body holds ``numbers`` numbers for each bucket, from which a receiver computes its
    ``alphabet`` levels (coding/bucket_levels.py), then the codes' 32-bit words
    (kernels/packing.py). A codec defines ``name`` and implements ``codec_settings``,
    ``quantize_buckets`` and, if the numbers are not the levels, ``values``.

    Args:
        settings: Shared settings.
        alphabet: Number of levels.
        numbers: Numbers sent for each bucket.
        level_dtype: "float32" or "float16".
    """

    def __init__(
        self, settings: Settings, alphabet: int, numbers: int, level_dtype: str = "float32"
    ) -> None:
        self.level_dtype = check_choice("level_dtype", level_dtype, tuple(FORMATS))
        self._alphabet, self._numbers = alphabet, numbers
        self._format = FORMATS[self.level_dtype]
        self._packing = packing_of(alphabet)
        super().__init__(settings)

    @property
    def alphabet(self) -> int:
        return self._alphabet

    @abstractmethod
    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        """Fill ``words`` with the codes; return the buckets' numbers.

        The result is float32 (buckets, numbers). A receiver computes the levels from it.
        """

    def values(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the buckets' ascending levels, float32 (buckets, alphabet), from their numbers."""
        return numbers

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
        at, buckets = self._level_bytes(out.numel()), self._buckets(out.numel())
        pairs = [
            (
                self.values(self._format.read(body[:at], buckets, self._numbers)),
                body[at:].view(torch.int32),
            )
            for body in bodies
        ]
        code_kernels(out).decode_add(pairs, self._bucket(out.numel()), factor, out)

    def _level_bytes(self, coordinates: int) -> int:
        return self._format.section_bytes(self._buckets(coordinates), self._numbers)


class RandomRounding(BucketCodec):
    """Base of codecs that round at random, without bias, between neighbouring levels (ORQ, Eq. 7).

    A codec implements ``solve``.
    """

    @abstractmethod
    def solve(self, flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
        """Return the numbers of each bucket, float32 (buckets, numbers)."""

    def quantize_buckets(
        self, flat: torch.Tensor, words: torch.Tensor, bucket_size: int, key: int
    ) -> torch.Tensor:
        numbers = self._format.rounded(self.solve(flat, bucket_size))
        code_kernels(flat).round_codes(flat, self.values(numbers), words, bucket_size, key)
        return numbers


def mirrored(numbers: torch.Tensor) -> torch.Tensor:
    """Return two levels, -b and b, from one number."""
    return torch.cat([-numbers, numbers], dim=1)


def code_kernels(flat: torch.Tensor) -> ModuleType:
    """Return the kernels that round, pack and decode tensors on the device of ``flat``."""
    return kernels.for_device(flat.device, "bucket")


def level_kernels(flat: torch.Tensor) -> ModuleType:
    """Return the kernels that compute the levels of buckets on the device of ``flat``."""
    return kernels.for_device(flat.device, "levels")
