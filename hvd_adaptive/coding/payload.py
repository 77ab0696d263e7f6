"""Payloads: uint8 [header | body | full-precision section], each section padded to 8 bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hvd_adaptive import kernels
from hvd_adaptive.coding.header import SIZE, Header
from hvd_adaptive.errors import PayloadError


def padded(size: int) -> int:
    """``size`` bytes rounded up to a multiple of 8: every section can be viewed in place."""
    return -(-size // 8) * 8


@dataclass(frozen=True)
class Payload:
    """A payload and the views of its sections.

    bytes: uint8, 1-D, the whole payload.  body: uint8, the scheme's own section.
    full: the coordinates in full precision, in the payload's dtype.
    """

    header: Header
    bytes: torch.Tensor
    body: torch.Tensor
    full: torch.Tensor

    @classmethod
    def allocate(cls, header: Header, body_bytes: int, device: torch.device) -> Payload:
        """An unfilled payload; ``header.length`` is set here."""
        full_bytes = header.full * header.dtype.itemsize
        length = payload_bytes(body_bytes, full_bytes)
        data = torch.empty(length, dtype=torch.uint8, device=device)
        data[SIZE + body_bytes : SIZE + padded(body_bytes)] = 0
        data[SIZE + padded(body_bytes) + full_bytes :] = 0
        return cls(replace(header, length=length), data, *_sections(data, header, body_bytes))

    def seal(self, checksum: bool = True) -> torch.Tensor:
        """Write the header, with the checksum, or 0 in its place; returns the bytes."""
        header = replace(self.header, checksum=self._checksum() if checksum else 0)
        self.bytes[:SIZE] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        return self.bytes

    def verify(self) -> None:
        """Raise PayloadError where the checksum does not match."""
        if self._checksum() != self.header.checksum:
            raise PayloadError("payload is corrupt: its checksum does not match its bytes")

    def _checksum(self) -> int:
        words = self.bytes[SIZE:].view(torch.int32)
        return kernels.for_device(words.device).checksum(words, self.header.body_seed)


def payload_bytes(body_bytes: int, full_bytes: int) -> int:
    """Length of a payload with sections of these sizes."""
    return SIZE + padded(body_bytes) + padded(full_bytes)


def read_header(data: torch.Tensor) -> Header:
    """The header of a payload that begins at ``data[0]`` (uint8; more may follow it)."""
    return Header.unpack(bytes(data[:SIZE].cpu().numpy().tobytes()), data.numel())


def sections(data: torch.Tensor, header: Header, body_bytes: int) -> Payload:
    """Views of a received payload; raises PayloadError where its length is not what it must be."""
    expected = payload_bytes(body_bytes, header.full * header.dtype.itemsize)
    if data.numel() != header.length or expected != header.length:
        raise PayloadError(
            f"payload has {data.numel()} bytes and says {header.length}; "
            f"{header.coordinates} coordinates take {expected}"
        )
    if data.data_ptr() % 8 or data.storage_offset() % 8 or not data.is_contiguous():
        data = data.clone(memory_format=torch.contiguous_format)
    return Payload(header, data, *_sections(data, header, body_bytes))


def _sections(
    data: torch.Tensor, header: Header, body_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    full_at = SIZE + padded(body_bytes)
    full = data[full_at : full_at + header.full * header.dtype.itemsize]
    return data[SIZE : SIZE + body_bytes], full.view(header.dtype)


def split(data: torch.Tensor, count: int) -> list[torch.Tensor]:
    """``count`` payloads that lie end to end; PayloadError where they are more, fewer or cut."""
    found, at = [], 0
    for _ in range(count):
        length = read_header(data[at:]).length
        found.append(data[at : at + length])
        at += length
    if at != data.numel():
        raise PayloadError(f"received {data.numel()} bytes, the payloads say {at}")
    return found
