"""Define Quantizer, what a scheme implements: the bodies of payloads."""

from __future__ import annotations

import functools
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_adaptive import kernels
from hvd_adaptive._version import __version__
from hvd_adaptive.base.errors import WarnOnce
from hvd_adaptive.coding.coders import Coder
from hvd_adaptive.coding.payload import Payload, padded
from hvd_adaptive.settings import Settings

logger = logging.getLogger("hvd_adaptive")


class Quantizer(ABC):
    """Quantise coordinates to bodies, and add bodies up; see payloads.py for payloads.

    A scheme defines ``name`` and implements ``alphabet``, ``codec_settings``, ``body_bytes``,
    ``encode_body``, and ``add_bodies`` or ``decode_bodies``. A scheme whose bodies lossless coders
    can shorten lists them in ``codings`` and implements ``coder``. Its bodies hold 4 bytes for each
    bucket, then the words of codes, which the coder's stream replaces.
    """

    name: str = ""
    codings: tuple[str, ...] = ("fixed",)
    knows_errors: bool = False  # there are ``expected_errors``
    # Plain torch would be too slow: tensors on a device are copied to the host, and results back.
    encodes_on_host = False
    # A coordinate that is zero is decoded to zero, whatever is in its bucket but NaN or Inf.
    has_zero = False
    # Counts a payload of a training step that this rank sends; for codecs with rate control.
    count: Callable[[Payload], None] | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # ``set`` calls a custom scheme's constructor again.
        names = ("codec_fingerprint", "settings_fingerprint", "described", "leaves_zeros_out")
        for cached in names:
            self.__dict__.pop(cached, None)
        self.warn_of_copies = WarnOnce(logger)

    @functools.cached_property
    def leaves_zeros_out(self) -> bool:
        """Return whether bodies hold the coordinates that are not zero (coding/zeros.py)."""
        return self.settings.keep_zeros and not self.has_zero

    @property
    @abstractmethod
    def alphabet(self) -> int:
        """Return the number of different codes."""

    @property
    def table_version(self) -> int:
        """Return how often the table was fitted; 0 for fixed tables."""
        return 0

    @property
    def table_fingerprint(self) -> int:
        """Return 32 bits that differ between tables."""
        return 0

    @property
    def table_state(self) -> tuple[int, int, int]:
        """Return three numbers with which all that follows from the table changes."""
        return self.alphabet, self.table_version, self.table_fingerprint

    @abstractmethod
    def codec_settings(self) -> dict[str, Any]:
        """Return the scheme's settings that a payload's bytes depend on."""

    def scheme_settings(self) -> dict[str, Any]:
        """Return all of the scheme's own settings; they must be equal on all ranks."""
        return self.codec_settings()

    @abstractmethod
    def body_bytes(self, coordinates: int) -> int:
        """Return the bytes of a body of ``coordinates`` coordinates; the most if they vary."""

    def least_body_bytes(self, coordinates: int) -> int:
        """Return the fewest bytes of such a body, less than ``body_bytes`` if the length varies;
        they bound the memory that a corrupt header can make a receiver allocate.
        """
        return self.body_bytes(coordinates)

    def varies(self, coordinates: int) -> bool:
        """Return whether bodies of ``coordinates`` coordinates vary in length."""
        most = self.body_bytes(coordinates)
        return self.coder is not None or self.least_body_bytes(coordinates) < most

    @abstractmethod
    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> int | None:
        """Quantise ``flat`` (float32, 1-D) into ``body`` (uint8, body_bytes(flat.numel())). Return
        the length in bytes if it varies; ``body[:length]`` is the body.
        """

    def decode_bodies(
        self,
        bodies: Sequence[torch.Tensor],
        keys: Sequence[int],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
    ) -> None:
        """Set ``out`` (float32, 1-D) to factor * (out + the bodies' values, added in order).

        Schemes implement either this method, which raises PayloadError if a body cannot be read, or
        ``add_bodies``. If the length of bodies (uint8) varies, up to 7 zero bytes follow each. If
        not ``add``, the contents of ``out`` count as zeros.
        """
        if not add:
            out.zero_()
        self.add_bodies(bodies, keys, factor, out)

    def decode_own_bodies(
        self,
        bodies: Sequence[torch.Tensor],
        keys: Sequence[int],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
    ) -> None:
        """Do as ``decode_bodies``, without waiting for a GPU, for bodies with this codec's seed."""
        self.decode_bodies(bodies, keys, factor, out, add)

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> None:
        """Implement ``decode_bodies`` for add=True."""
        raise NotImplementedError

    # Lossless coding of bodies --------------------------------------------------------------------

    @property
    def coder(self) -> Coder | None:
        """Return the lossless coder of bodies, or None."""
        return None

    def coded_body(self, body: torch.Tensor, coordinates: int) -> torch.Tensor | None:
        """Return a coded body, or None if the payload would not become shorter."""
        at = 4 * self._buckets(coordinates)
        most = padded(self.body_bytes(coordinates)) - 8 - at
        if self.coder is None or most <= 0:
            return None
        stream = self.coder.encode(body[at:].view(torch.int32), coordinates, most)
        return None if stream is None else torch.cat([body[:at], stream])

    def fixed_body(self, coded: torch.Tensor, coordinates: int) -> torch.Tensor:
        """Invert ``coded_body``, or raise PayloadError; up to 7 zero bytes follow ``coded``."""
        at = 4 * self._buckets(coordinates)
        assert self.coder is not None  # a codec reads only payloads of its own coding
        words = self.coder.decode(coded[at:], coordinates)
        return torch.cat([coded[:at], words.view(torch.uint8)])

    def least_coded_bytes(self, coordinates: int) -> int:
        """Return the fewest bytes of a coded body, as ``least_body_bytes``."""
        least = 0 if self.coder is None else self.coder.least_stream_bytes(coordinates)
        return 4 * self._buckets(coordinates) + least

    # Codecs of averages ---------------------------------------------------------------------------

    @abstractmethod
    def second_codec(self, bits: int) -> Quantizer:
        """Return a quantiser for averages, unbiased and without clipping."""

    def fitted_to(self, flat: torch.Tensor) -> Quantizer:
        """Return this quantiser or, if it adapts, a copy of it that is fitted to ``flat``."""
        return self

    def trained_second(self, bits: int, ranks: int, flat: torch.Tensor) -> Quantizer:
        """Return a quantiser for averages of ``ranks`` ranks, fitted as training on ``flat``
        (float32) does, to which this quantiser is fitted.
        """
        return self.second_codec(bits).fitted_to(flat)

    # Errors ---------------------------------------------------------------------------------------

    def body_roundtrip(self, flat: torch.Tensor, key: int) -> torch.Tensor:
        """Return ``flat`` (float32) encoded in a body, and decoded."""
        out = torch.empty_like(flat)
        self.decode_own_bodies([self._body(flat, key)], [key], 1.0, out, add=False)
        return out

    @property
    def expected_error(self) -> float | None:
        """Return the relative squared error of large buckets; None if it depends on their law."""
        return None

    def expected_errors(self, flat: torch.Tensor) -> torch.Tensor:
        """Return ``Payloads.squared_errors`` by a formula, if ``knows_errors``."""
        raise NotImplementedError

    # Bodies ---------------------------------------------------------------------------------------

    def _buckets(self, coordinates: int) -> int:
        return -(-coordinates // self.settings.bucket_size)

    def _bucket(self, coordinates: int) -> int:
        """Return the bucket size, or ``coordinates`` if that is less."""
        return max(1, min(self.settings.bucket_size, coordinates))

    def _clipped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return ``flat`` (float32) clipped as in ALQ Eq. 49, or itself without clipping."""
        if self.settings.clip is None:
            return flat
        ops = kernels.for_device(flat.device)
        return ops.clipped(flat, self._bucket(flat.numel()), self.settings.clip)

    def _body(self, flat: torch.Tensor, key: int) -> torch.Tensor:
        """Return a body alone, of its actual length."""
        body = torch.empty(self.body_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        return body[: self.encode_body(flat, body, key)]

    @functools.cached_property
    def codec_fingerprint(self) -> int:
        """Return 32 bits of the settings that a receiver must share."""
        return zlib.crc32(repr((self.name, sorted(self.codec_settings().items()))).encode())

    @functools.cached_property
    def settings_fingerprint(self) -> int:
        """Return 32 bits of the scheme and all settings that must be equal on all ranks."""
        agreed = sorted((self.settings.shared() | self.scheme_settings()).items())
        return zlib.crc32(repr((__version__, self.name, agreed)).encode())

    @functools.cached_property
    def described(self) -> str:
        """Return the settings that must be equal on all ranks, as keywords."""
        settings = self.scheme_settings() | self.settings.shared()
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())

    def __repr__(self) -> str:
        return f"{self.name}({self.described})"
