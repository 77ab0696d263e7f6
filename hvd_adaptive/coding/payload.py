"""Payloads: uint8 [header | body | full-precision section], each section padded to 8 bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hvd_adaptive import kernels
from hvd_adaptive.coding.header import SIZE, Header
from hvd_adaptive.device import Later, stacked
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

    def to(self, device: torch.device) -> Payload:
        """A copy on another device."""
        data = self.bytes.to(device)
        return Payload(self.header, data, *_sections(data, self.header, self.body.numel()))

    def seal(self, checksum: bool = True) -> torch.Tensor:
        """Write the header, with the checksum, or 0 in its place; returns the bytes."""
        seed = self.header.body_seed if checksum else None
        ops = kernels.for_device(self.bytes.device, "checksum")
        ops.seal(self.bytes, self.header.pack(), seed)
        return self.bytes


def verifying(payloads: Sequence[Payload]) -> Callable[[], None]:
    """Begin to compare payloads' checksums; what is returned ends it, and raises PayloadError
    where one does not match. On the CPU all is done at once."""
    if not payloads:
        return lambda: None
    ops = kernels.for_device(payloads[0].bytes.device, "checksum")
    seeds = [payload.header.body_seed for payload in payloads]
    found = ops.checksums([payload.bytes for payload in payloads], seeds)
    wanted = [payload.header.checksum for payload in payloads]
    if isinstance(found, torch.Tensor):
        there = Later(found)
        return lambda: _compare([value & 0xFFFFFFFF for value in there.get().tolist()], wanted)
    _compare(found, wanted)
    return lambda: None


def _compare(found: Sequence[int], wanted: Sequence[int]) -> None:
    if found != wanted:
        raise PayloadError("payload is corrupt: its checksum does not match its bytes")


@dataclass(frozen=True)
class Arrived:
    """A payload as it was received, and its header."""

    header: Header
    bytes: torch.Tensor


def payload_bytes(body_bytes: int, full_bytes: int) -> int:
    """Length of a payload with sections of these sizes."""
    return SIZE + padded(body_bytes) + padded(full_bytes)


def read_header(data: torch.Tensor) -> Header:
    """The header of a payload that begins at ``data[0]`` (uint8; more may follow it)."""
    return Header.unpack(bytes(data[:SIZE].cpu().numpy().tobytes()), data.numel())


def arrived(payloads: Sequence[torch.Tensor]) -> list[Arrived]:
    """Payloads that each have a tensor of their own, their headers read in one copy."""
    if payloads[0].is_cuda and all(payload.numel() >= SIZE for payload in payloads):
        heads = list(stacked([payload[:SIZE] for payload in payloads]).get())
    else:
        heads = [payload[:SIZE].cpu() for payload in payloads]
    return [
        Arrived(Header.unpack(head.numpy().tobytes(), payload.numel()), payload)
        for head, payload in zip(heads, payloads, strict=True)
    ]


class Heads:
    """The first bytes of payloads that lie end to end in one tensor, on the host.

    guesses: where payloads may begin. On CUDA these are read in one copy, any others in one each.
    """

    def __init__(self, data: torch.Tensor, guesses: Iterable[int] = ()) -> None:
        self._data = data
        self._known: dict[int, torch.Tensor] = {}
        if data.is_cuda:
            places = sorted({at for at in guesses if 0 <= at <= data.numel() - SIZE})
            if places:
                heads = stacked([data[at : at + SIZE] for at in places]).get()
                self._known = dict(zip(places, heads, strict=True))

    def at(self, place: int) -> bytes:
        """SIZE bytes from there, or fewer where the tensor ends."""
        head = self._known.get(place)
        if head is None:
            head = self._data[place : place + SIZE].cpu()
        return head.numpy().tobytes()

    def header(self, place: int) -> Header:
        """That of the payload that begins there; PayloadError where it cannot be read."""
        return Header.unpack(self.at(place), self._data.numel() - place)


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


def split(data: torch.Tensor, count: int) -> list[Arrived]:
    """``count`` payloads that lie end to end; PayloadError where they are more, fewer or cut."""
    size = data.numel() // count
    heads = Heads(data, [rank * size for rank in range(count)])
    found, at = [], 0
    for _ in range(count):
        header = heads.header(at)
        found.append(Arrived(header, data[at : at + header.length]))
        at += header.length
    if at != data.numel():
        raise PayloadError(f"received {data.numel()} bytes, the payloads say {at}")
    return found
