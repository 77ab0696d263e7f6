"""Build and open payloads: uint8 [header | body | zeros | full-precision section].

The header has 96 bytes, little-endian. Each section is padded to a multiple of 8 bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.base.tensors import HostCopy, stacked
from hvd_adaptive.coding import CODINGS
from hvd_adaptive.kernels.checksum import CHECKSUM_AT, HEADER_BYTES
from hvd_adaptive.kernels.zeros import Runs

MAGIC = b"HVDA"
FORMAT = 1
SIZE = HEADER_BYTES
_FIELDS = struct.Struct("<4sHBBII16sQQQIIQQQII")

CODING_NAMES = {code: name for name, code in CODINGS.items()}
DTYPES = {1: torch.float16, 2: torch.bfloat16, 3: torch.float32, 4: torch.float64}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Frame(NamedTuple):
    """Fields of a payload that a receiver can compute before it arrives; a Header has them too."""

    coordinates: int
    full: int
    dtype: torch.dtype
    layout: int


class Header(NamedTuple):
    """Header of a payload, in the order of its bytes (docs/wire_format.md); a receiver compares it
    with its own settings.
    """

    dtype: torch.dtype
    coding: str
    alphabet: int
    checksum: int
    scheme: str
    coordinates: int
    full: int
    bucket_size: int
    table_version: int
    table_fingerprint: int
    key: int
    layout: int
    length: int
    settings: int
    zeros: int

    def pack(self) -> bytes:
        """Return the 96 bytes."""
        dtype, coding, alphabet, checksum, scheme, *numbers = self
        codes = DTYPE_CODES[dtype], CODINGS[coding]
        name = scheme.encode("ascii")
        return _FIELDS.pack(MAGIC, FORMAT, *codes, alphabet, checksum, name, *numbers)

    @classmethod
    def unpack(cls, data: bytes, available: int) -> Header:
        """Read a header from the first bytes of a payload of ``available`` bytes, whose checksum
        the caller compares; raise PayloadError if it is short, foreign or inconsistent.
        """
        if len(data) < SIZE:
            raise PayloadError(f"payload of {available} bytes is shorter than its header of {SIZE}")
        fields = _FIELDS.unpack_from(data)
        magic, version, dtype, coding, alphabet, checksum, scheme, *numbers = fields
        if magic != MAGIC:
            raise PayloadError(f"payload starts with {magic!r}, not {MAGIC!r}: foreign data")
        if version != FORMAT:
            raise PayloadError(f"payload has format version {version}, this package reads {FORMAT}")
        if dtype not in DTYPES or coding not in CODING_NAMES:
            raise PayloadError("payload header is corrupt")
        codes, name = (DTYPES[dtype], CODING_NAMES[coding]), scheme.rstrip(b"\0")
        header = cls(*codes, alphabet, checksum, name.decode("ascii", "replace"), *numbers)
        if header.zeros % 8 or header.full > header.coordinates:
            raise PayloadError("payload header is corrupt")
        if header.length > available:
            raise PayloadError(f"payload is truncated: {available} of {header.length} bytes")
        return header


def body_seed(packed: bytes) -> int:
    """Return the header's part of the checksum: CRC-32 of its bytes with a zero checksum field."""
    begin = zlib.crc32(bytes(4), zlib.crc32(packed[:CHECKSUM_AT]))
    return zlib.crc32(packed[CHECKSUM_AT + 4 :], begin)


def padded(size: int) -> int:
    """Return ``size`` rounded up to a multiple of 8 bytes: every section can be viewed in place."""
    return -(-size // 8) * 8


class OwnedBuffer:
    """Bytes (uint8, 1-D) that a collective may read while it is in progress.

    A tensor may be a view of a gradient or of memory that the next group reuses meanwhile. An
    object of this type always owns its memory: ``OwnedBuffer(size)`` allocates it, for the caller
    to fill before it is sent, and ``copy_of`` copies a tensor that others may write to.
    """

    __slots__ = ("bytes", "size")

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device or "cpu")
        self.size = size

    @classmethod
    def copy_of(cls, tensor: torch.Tensor, device: torch.device | None = None) -> OwnedBuffer:
        """Return a copy of a tensor of any dtype, on the same or another device."""
        data = tensor.detach().reshape(-1).view(torch.uint8)
        return cls._around(data.to(device or data.device, copy=True))

    def part(self, begin: int, end: int | None = None) -> OwnedBuffer:
        """Return bytes ``begin`` to ``end`` of the same memory."""
        return self._around(self.bytes[begin:end])

    @classmethod
    def _around(cls, data: torch.Tensor) -> OwnedBuffer:
        made = cls.__new__(cls)
        made.bytes, made.size = data, data.numel()
        return made


def check_owned(name: str, *parts: object) -> None:
    """Raise TypeError if one of ``parts`` is not an OwnedBuffer, and so may be borrowed memory."""
    for part in parts:
        if not isinstance(part, OwnedBuffer):
            raise TypeError(
                f"{name}: a collective sends an OwnedBuffer only, not {type(part).__name__}; "
                "OwnedBuffer.copy_of copies a tensor that may change"
            )


@dataclass(frozen=True)
class Payload:
    """A payload (uint8, 1-D) with its header, and a view of its body, the scheme's own section.
    ``runs`` are the numbers with which ``zeros`` begins; None if that is empty.
    """

    header: Header
    bytes: torch.Tensor
    body: torch.Tensor
    runs: Runs | None = None

    @property
    def zeros(self) -> torch.Tensor:
        """Return a view of the section that says which coordinates are zero (coding/zeros.py)."""
        return section_of_zeros(self.bytes, self.header)

    @property
    def full(self) -> torch.Tensor:
        """Return a view of the full-precision coordinates, in the payload's dtype."""
        size = self.header.full * self.header.dtype.itemsize
        return self.bytes[self.header.length - padded(size) :][:size].view(self.header.dtype)

    def to(self, device: torch.device) -> Payload:
        """Return a copy on another device."""
        data = self.bytes.to(device)
        return Payload(self.header, data, data[SIZE : SIZE + self.body.numel()], self.runs)


@dataclass(frozen=True)
class Encoded(Payload):
    """Payload that was encoded by this rank and may be sent: ``memory`` holds exactly its bytes."""

    memory: OwnedBuffer = field(kw_only=True)

    def to(self, device: torch.device) -> Encoded:
        """Return a copy on another device."""
        memory = OwnedBuffer.copy_of(self.bytes, device)
        body = memory.bytes[SIZE : SIZE + self.body.numel()]
        return Encoded(self.header, memory.bytes, body, self.runs, memory=memory)


def checksums(payloads: Sequence[Payload]) -> Sequence[int] | HostCopy:
    """Return payloads' checksums; on a GPU, the copy to the host that has begun."""
    contents, seeds = [], []
    for payload in payloads:
        contents.append(payload.bytes)
        seeds.append(body_seed(payload.header.pack()))
    found = kernels.for_device(contents[0].device, "checksum").checksums(contents, seeds)
    return HostCopy(found) if isinstance(found, torch.Tensor) else found


class Arrived(NamedTuple):
    """Received payload and its header."""

    header: Header
    bytes: torch.Tensor


def compare_checksums(
    found: Sequence[int] | HostCopy, payloads: Sequence[Payload | Arrived]
) -> None:
    """Raise PayloadError if one of ``checksums`` is not that in the header; wait for a GPU."""
    if isinstance(found, HostCopy):
        found = [value & 0xFFFFFFFF for value in found.get().tolist()]
    for checksum, payload in zip(found, payloads, strict=True):
        if checksum != payload.header.checksum:
            raise PayloadError("payload is corrupt: its checksum does not match its bytes")


def payload_bytes(body_bytes: int, full_bytes: int, zeros_bytes: int = 0) -> int:
    """Return the length of a payload with sections of these sizes."""
    return SIZE + padded(body_bytes) + zeros_bytes + padded(full_bytes)


def read_header(data: torch.Tensor) -> Header:
    """Return the header of a payload that begins at ``data[0]`` (uint8; more data may follow)."""
    return Header.unpack(data[:SIZE].cpu().numpy().tobytes(), data.numel())


def arrived(payloads: Sequence[torch.Tensor]) -> list[Arrived]:
    """Return payloads that each have a tensor of their own; their headers are read in one copy."""
    if payloads[0].is_cuda and all(payload.numel() >= SIZE for payload in payloads):
        heads = list(stacked([payload[:SIZE] for payload in payloads]).get())
    else:
        heads = [payload[:SIZE].cpu() for payload in payloads]
    return [
        Arrived(Header.unpack(head.numpy().tobytes(), payload.numel()), payload)
        for head, payload in zip(heads, payloads, strict=True)
    ]


def payloads_in(
    received: Sequence[torch.Tensor],
    ranks: Sequence[int],
    guesses: Iterable[int] | None = None,
    check: Callable[[int, bytes], None] | None = None,
) -> Iterator[Arrived]:
    """Yield the payloads of ``ranks``: each in its rank's tensor, or all end to end in one. Raise
    PayloadError if one cannot be read, or bytes remain after the last one.

    Args:
        received: One tensor for each rank, or one tensor.
        ranks: The ranks that have sent a payload.
        guesses: Offsets in the one tensor at which payloads may begin; equal parts of it if None.
            On CUDA the headers at these offsets are read in one copy, any others in one copy each.
        check: Called before a payload is read, with the rank and its first bytes.
    """
    data, taken = received[0], 0
    known: dict[int, torch.Tensor] = {}
    if data.is_cuda and len(received) == 1:
        if guesses is None:
            guesses = range(0, data.numel(), data.numel() // len(ranks) or 1)
        places = sorted({at for at in guesses if 0 <= at <= data.numel() - SIZE})
        if places:
            heads = stacked([data[at : at + SIZE] for at in places]).get()
            known = dict(zip(places, heads, strict=True))
    for rank in ranks:
        data, at = (received[rank], 0) if len(received) > 1 else (data, taken)
        head = known[at] if at in known else data[at : at + SIZE].cpu()
        first = head.numpy().tobytes()
        if check is not None:
            check(rank, first)
        header = Header.unpack(first, data.numel() - at)
        taken += header.length
        yield Arrived(header, data[at : at + header.length])
    size = sum(map(torch.Tensor.numel, received))
    if taken != size:
        raise PayloadError(f"received {size} bytes, the headers say {taken}")


def section_of_zeros(data: torch.Tensor, header: Header) -> torch.Tensor:
    """Return ``Payload.zeros`` of a received payload, whose body's length may follow from it."""
    end = header.length - padded(header.full * header.dtype.itemsize)
    if data.numel() != header.length or SIZE + header.zeros > end:
        raise PayloadError(f"payload of {data.numel()} bytes is too short for its sections")
    return data[end - header.zeros : end]


def opened(
    data: torch.Tensor, header: Header, body_bytes: int, runs: Runs | None = None
) -> Payload:
    """Return a received payload with a view of its body; raise PayloadError on a wrong length."""
    expected = payload_bytes(body_bytes, header.full * header.dtype.itemsize, header.zeros)
    if data.numel() != header.length or expected != header.length:
        raise PayloadError(
            f"payload has {data.numel()} bytes, its header says {header.length}; "
            f"{header.coordinates} coordinates need {expected}"
        )
    if data.data_ptr() % 8 or data.storage_offset() % 8 or not data.is_contiguous():
        data = data.clone(memory_format=torch.contiguous_format)
    return Payload(header, data, data[SIZE : SIZE + body_bytes], runs)
