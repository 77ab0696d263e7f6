"""Define Codec: the payloads of a scheme's bodies, without ranks or Horovod."""

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
from hvd_adaptive.coding import payload as payloads
from hvd_adaptive.coding.coder import Coder
from hvd_adaptive.coding.header import Frame, Header
from hvd_adaptive.coding.sendable import Sendable
from hvd_adaptive.device import HostCopy
from hvd_adaptive.errors import BodyCheck, PayloadError
from hvd_adaptive.finite import narrowed
from hvd_adaptive.kernels.block_sums import BlockSums
from hvd_adaptive.once import WarnOnce
from hvd_adaptive.settings import Settings

logger = logging.getLogger("hvd_adaptive")

# Header fields that a receiver compares, in the order in which errors name them.
_CHECKED = (
    "scheme",
    "alphabet",
    "bucket_size",
    "coding",
    "settings",
    "table_version",
    "table_fingerprint",
    "coordinates",
    "full",
    "dtype",
    "layout",
)

# A payload, with its header if that has been read.
Received = torch.Tensor | payloads.Arrived
# Result of encode_body: the body's length if that varies, or its block checksums.
EncodeResult = int | HostCopy | BlockSums | None


class Codec(ABC):
    """Quantiser of a scheme, and payloads made from its bodies.

    A scheme defines ``name`` and implements ``alphabet``, ``codec_settings``, ``body_bytes``,
    ``encode_body``, and ``add_bodies`` or ``decode_bodies``. A scheme whose bodies lossless coders
    can shorten lists them in ``codings`` and implements ``coder``, ``coded_body``, ``fixed_body``
    and ``least_coded_bytes``.
    """

    name: str = ""
    codings: tuple[str, ...] = ("fixed",)
    # Subject of the scheme's kernels if plain torch is too slow for them. On a device that has no
    # faster kernels, tensors are then copied to the host, and results back.
    slow_in_torch: str = ""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._warn_of_copies = WarnOnce(logger)

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
        """Return the fewest bytes of such a body, less than ``body_bytes`` if the length varies.

        They bound the memory that a corrupt header can make a receiver allocate.
        """
        return self.body_bytes(coordinates)

    def varies(self, coordinates: int) -> bool:
        """Return whether payloads of ``coordinates`` quantised coordinates vary in length."""
        least, most = self.least_body_bytes(coordinates), self.body_bytes(coordinates)
        return self.coder is not None or least < most

    @abstractmethod
    def encode_body(self, flat: torch.Tensor, body: torch.Tensor, key: int) -> EncodeResult:
        """Quantise ``flat`` (float32, 1-D) into ``body`` (uint8, body_bytes(flat.numel())).

        Returns:
            The length in bytes if it varies; ``body[:length]`` is the body, and waits for a GPU.
            Otherwise the block checksums of the body if they are known, or None.
        """

    def decode_bodies(
        self,
        bodies: Sequence[torch.Tensor],
        keys: Sequence[int],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
    ) -> BodyCheck | None:
        """Set ``out`` (float32, 1-D) to factor * (out + the bodies' values, added in order).

        Schemes implement either this method or ``add_bodies``.

        Args:
            bodies: Bodies (uint8). If their length varies, up to 7 zero bytes follow each.
            keys: The key of each body.
            factor: Scale of the sum.
            out: Result, in place.
            add: If False, the contents of ``out`` are ignored and count as zeros.

        Returns:
            None, or a function that waits for a device and raises PayloadError if a body could not
            be read.

        Raises:
            PayloadError: A body cannot be read.
        """
        if not add:
            out.zero_()
        return self.add_bodies(bodies, keys, factor, out)

    def add_bodies(
        self, bodies: Sequence[torch.Tensor], keys: Sequence[int], factor: float, out: torch.Tensor
    ) -> BodyCheck | None:
        """Implement ``decode_bodies`` for add=True."""
        raise NotImplementedError

    # Lossless coding of bodies --------------------------------------------------------------------

    @property
    def coder(self) -> Coder | None:
        """Return the lossless coder of bodies, or None."""
        return None

    def coded_body(self, body: torch.Tensor, coordinates: int) -> torch.Tensor | None:
        """Return a coded body, or None if the payload would not become shorter."""
        return None

    def fixed_body(self, coded: torch.Tensor, coordinates: int) -> torch.Tensor:
        """Invert ``coded_body``; up to 7 zero bytes follow ``coded``.

        Raises:
            PayloadError: The coded body cannot be read.
        """
        raise NotImplementedError

    def least_coded_bytes(self, coordinates: int) -> int:
        """Return the fewest bytes of a coded body, as ``least_body_bytes``."""
        raise NotImplementedError

    # Codecs of averages ---------------------------------------------------------------------------

    @abstractmethod
    def second_codec(self, bits: int) -> Codec:
        """Return a codec for averages, unbiased and without clipping."""

    def fitted_to(self, flat: torch.Tensor) -> Codec:
        """Return this codec or, if it adapts, a copy of it that is fitted to ``flat``."""
        return self

    # Payloads -------------------------------------------------------------------------------------

    def payload_bytes(self, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Return the length of a payload; the most if bodies vary in length or are coded.

        Args:
            quantized: Number of quantised coordinates.
            full: Number of full-precision coordinates.
            dtype: Their dtype.
        """
        return payloads.payload_bytes(self.body_bytes(quantized), full * dtype.itemsize)

    def check_device(self, device: torch.device) -> None:
        """Warn if encoding tensors on ``device`` is slow.

        Raises:
            ValueError: They cannot be encoded with these settings.
        """
        if device.type == "cpu":
            return
        if self.settings.coding != "fixed":
            raise ValueError(
                f"coding={self.settings.coding!r}: must be 'fixed' for tensors on {device.type}: "
                "lossless coders run on the CPU alone"
            )
        if self.is_on_host(device):
            self._warn_of_copies(
                "%s without triton: gradients on %s are copied to the host and encoded there, "
                "payloads copied back, which takes longer than the codes save on fast networks",
                self.name,
                device.type,
            )

    def is_on_host(self, device: torch.device) -> bool:
        """Return whether tensors on ``device`` are copied to the host and encoded there."""
        return bool(self.slow_in_torch) and not kernels.has_fast(device, self.slow_in_torch)

    def encode_flat(
        self,
        flat: torch.Tensor,
        quantized: int,
        key: int,
        layout: int = 0,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the bytes of ``encode_payload``, without counting them as sent."""
        return self._encoded(flat, quantized, key, layout, values).bytes

    def encode_payload(
        self,
        flat: torch.Tensor,
        quantized: int,
        key: int,
        layout: int = 0,
        values: torch.Tensor | None = None,
        memory: Sendable | None = None,
    ) -> payloads.Encoded:
        """Encode a group of a training step; codecs that control their rate count its bits.

        Args:
            flat: Coordinates (1-D). The first ``quantized`` are encoded, the others appended in
                full precision.
            quantized: Number of quantised coordinates.
            key: Names the random numbers.
            layout: Fingerprint of the layout, for the header.
            values: Encoded in place of the first ``quantized`` coordinates, if given.
            memory: Memory for the payload, used from its beginning if it is large enough and on the
                same device.
        """
        return self._encoded(flat, quantized, key, layout, values, memory)

    def _encoded(
        self,
        flat: torch.Tensor,
        quantized: int,
        key: int,
        layout: int,
        values: torch.Tensor | None,
        memory: Sendable | None = None,
    ) -> payloads.Encoded:
        values = (flat[:quantized] if values is None else values).to(torch.float32)
        if self.is_on_host(flat.device):
            copies = flat.cpu(), quantized, key, layout, values.cpu()
            return self._encoded(*copies).to(flat.device)
        coding, body, sums = "fixed", None, None
        if self.varies(quantized):
            body = self._body(values, key)
            coded = self.coded_body(body, quantized)
            coding, body = ("fixed", body) if coded is None else (self.settings.coding, coded)
        size = self.body_bytes(quantized) if body is None else body.numel()
        full = flat.numel() - quantized
        header = Header(
            scheme=self.name,
            dtype=flat.dtype,
            coding=coding,
            alphabet=self.alphabet,
            coordinates=flat.numel(),
            full=full,
            bucket_size=self.settings.bucket_size,
            table_version=self.table_version,
            table_fingerprint=self.table_fingerprint,
            key=key,
            layout=layout,
            length=payloads.payload_bytes(size, full * flat.dtype.itemsize),
            settings=self.codec_fingerprint,
        )
        if memory is None or memory.size < header.length:
            memory = Sendable(header.length, flat.device)
        payload = payloads.Encoded.within(memory.part(0, header.length), header, size)
        if body is None:
            result = self.encode_body(values, payload.body, key)
            sums = result if isinstance(result, BlockSums) and result.size == size else None
        else:
            payload.body.copy_(body)
        if full:
            payload.full.copy_(flat[quantized:])
        payload.seal(self.settings.checksum, sums)
        return payload

    def decode_sum(
        self, encoded: Sequence[Received], expected: Header | Frame, factor: float
    ) -> torch.Tensor:
        """Return ``decode_wide`` in ``expected``'s dtype; averages of finite values stay finite."""
        wide = self.decode_wide(encoded, expected, factor)
        if factor * len(encoded) > 1:  # a sum, which may be too large for the dtype
            return wide.to(expected.dtype)
        quantized = expected.coordinates - expected.full
        largest = torch.finfo(torch.float32).max
        wide[:quantized].clamp_(-largest, largest)
        return narrowed(wide, quantized, expected.dtype)

    def decode_wide(
        self, encoded: Sequence[Received], expected: Header | Frame, factor: float
    ) -> torch.Tensor:
        """Return factor * sum of payloads, added in order.

        The result is float32, or float64 if that is ``expected``'s dtype. Sums of quantised
        coordinates are float32 in either case.

        Raises:
            PayloadError: A payload differs from ``expected`` in coordinates, dtype or layout, or
                does not fit this codec.
        """
        opened = [self._open(payload, expected) for payload in encoded]
        # Sizes come from headers, so verify everything before memory is allocated.
        self._verifying(opened)()
        wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
        out = torch.empty(expected.coordinates, dtype=wide, device=opened[0].bytes.device)
        quantized = expected.coordinates - expected.full
        self._decode_sections(opened, factor, out[:quantized], out[quantized:])()
        return out

    def decode_into(
        self,
        encoded: Sequence[Received],
        expected: Header | Frame,
        factor: float,
        values: torch.Tensor,
        full: torch.Tensor,
    ) -> None:
        """Write the two sections of ``decode_wide`` to given memory of its dtype.

        The contents of that memory are undefined if PayloadError is raised.
        """
        opened = [self._open(payload, expected) for payload in encoded]
        # A device decodes while the host waits for the checksums.
        verified = self._verifying(opened)
        readable = self._decode_sections(opened, factor, values, full)
        verified()
        readable()

    def _decode_sections(
        self,
        opened: Sequence[payloads.Payload],
        factor: float,
        values: torch.Tensor,
        full: torch.Tensor,
    ) -> BodyCheck:
        wide = values.dtype != torch.float32
        narrow = values.new_empty(values.shape, dtype=torch.float32) if wide else values
        readable = self.decode_opened(opened, factor, narrow, add=False)
        if wide:
            values.copy_(narrow)
        if not full.numel():
            return readable
        full.zero_()
        for payload in opened:
            full += payload.full.to(full.dtype)
        full *= factor
        return readable

    def decode_opened(
        self,
        opened: Sequence[payloads.Payload],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
    ) -> BodyCheck:
        """Set ``out`` (float32, 1-D) to factor * (out + the payloads' values, added in order).

        Coded bodies are expanded one at a time, so that memory does not grow with the ranks.

        Args:
            opened: Payloads with checked headers.
            factor: Scale of the sum.
            out: Result, in place.
            add: If False, the contents of ``out`` are ignored and count as zeros.

        Returns:
            A function that waits for a device and raises PayloadError if a body could not be read.
        """
        if self.is_on_host(out.device):
            copy = out.cpu() if add else torch.empty(out.shape, dtype=out.dtype, device="cpu")
            cpu = copy.device
            self.decode_opened([payload.to(cpu) for payload in opened], factor, copy, add)
            out.copy_(copy)
            return _nothing_to_verify
        if all(p.header.coding == "fixed" for p in opened):
            bodies, keys = [p.body for p in opened], [p.header.key for p in opened]
            return self.decode_bodies(bodies, keys, factor, out, add) or _nothing_to_verify
        for number, payload in enumerate(opened, 1):
            body = payload.body
            if payload.header.coding != "fixed":
                body = self.fixed_body(body, out.numel())
            last = number == len(opened)
            key, adding = payload.header.key, add or number > 1
            self.decode_bodies([body], [key], factor if last else 1.0, out, adding)
        return _nothing_to_verify

    def roundtrip(self, flat: torch.Tensor, key: int) -> torch.Tensor:
        """Return ``flat`` (float32) as a receiver would decode it."""
        if self.is_on_host(flat.device):
            return self.roundtrip(flat.cpu(), key).to(flat.device)
        out = torch.empty_like(flat)
        self.decode_bodies([self._body(flat, key)], [key], 1.0, out, add=False)
        return out

    def squared_errors(self, flat: torch.Tensor, key: int) -> torch.Tensor:
        """Return the squared error and the squared L2 norm of each bucket, without waiting.

        Args:
            flat: Coordinates, float32.
            key: Names the random numbers.

        Returns:
            float64 (buckets, 2). The error is the expected one if a formula gives it, else that of
            one draw.
        """
        size = self.settings.bucket_size
        error = self.roundtrip(flat, key).sub_(flat)
        squares = [squares_of(values, size) for values in (error, flat)]
        return torch.stack(squares, dim=1)

    def body_length(self, header: Header) -> int:
        """Return the bytes of a payload's body, with its padding if the length varies.

        Raises:
            PayloadError: No body of so many coordinates has this length.
        """
        quantized = header.coordinates - header.full
        if header.coding == "fixed":
            most, least = self.body_bytes(quantized), self.least_body_bytes(quantized)
            if least == most:
                return most
        else:
            most = payloads.padded(self.body_bytes(quantized)) - 8
            least = self.least_coded_bytes(quantized)
        size = header.length - payloads.payload_bytes(0, header.full * header.dtype.itemsize)
        if size % 8 or not payloads.padded(least) <= size <= payloads.padded(most):
            raise PayloadError(
                f"payload has {header.length} bytes according to its header; its body of "
                f"{quantized} coordinates would have {size}, not {least} to {most}"
            )
        return size

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

    def _verifying(self, opened: Sequence[payloads.Payload]) -> Callable[[], None]:
        """Return payloads.verifying, of no payloads if they have no checksums."""
        return payloads.verifying(opened if self.settings.checksum else ())

    def _open(self, payload: Received, expected: Header | Frame) -> payloads.Payload:
        """Return a received payload after its header is checked, but not yet its checksum."""
        if isinstance(payload, torch.Tensor):
            header, data = payloads.read_header(payload), payload
        else:
            header, data = payload.header, payload.bytes
        known = "fixed" if self.coder is None else self.settings.coding
        own = Header(
            scheme=self.name,
            dtype=expected.dtype,
            coding=header.coding if header.coding == "fixed" else known,
            alphabet=self.alphabet,
            coordinates=expected.coordinates,
            full=expected.full,
            bucket_size=self.settings.bucket_size,
            table_version=self.table_version,
            table_fingerprint=self.table_fingerprint,
            key=header.key,
            layout=expected.layout,
            length=header.length,
            settings=self.codec_fingerprint,
            checksum=header.checksum,
        )
        if header != own:
            raise PayloadError(self._difference(header, own, known))
        return payloads.opened(data, header, self.body_length(header))

    def _difference(self, header: Header, own: Header, known: str) -> str:
        """Return an error message that names the first difference."""
        field = next(f for f in _CHECKED if getattr(header, f) != getattr(own, f))
        if field == "coding":
            return f"payload has coding {header.coding!r}, this compressor {known!r}"
        if field == "settings":
            listed = ", ".join(f"{name}={value!r}" for name, value in self.codec_settings().items())
            return f"payload was encoded with other settings than {listed}"
        return (
            f"payload has {field.replace('_', ' ')} {getattr(header, field)}, "
            f"this compressor {getattr(own, field)}"
        )

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


def squares_of(flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
    """Return each bucket's squared L2 norm, float64 (buckets,)."""
    return torch.stack([part.dot(part) for part in flat.to(torch.float64).split(bucket_size)])


def rounding_errors(flat: torch.Tensor, dtype: torch.dtype, bucket_size: int) -> torch.Tensor:
    """Return ``Codec.squared_errors`` of float32 numbers that are sent as ``dtype``."""
    error = flat.to(dtype).to(flat.dtype) - flat
    return torch.stack([squares_of(values, bucket_size) for values in (error, flat)], dim=1)


def _nothing_to_verify() -> None:
    """Do nothing: the verdict on bodies that have been read."""
