"""Define Form, what all payloads of one frame have in common; encode and open them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvd_adaptive import kernels
from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.base.tensors import HostCopy
from hvd_adaptive.codec.quantizer import Quantizer
from hvd_adaptive.coding.payload import (
    SIZE,
    Arrived,
    Encoded,
    Frame,
    Header,
    OwnedBuffer,
    Payload,
    body_seed,
    checksums,
    compare_checksums,
    opened,
    padded,
    payload_bytes,
    read_header,
    section_of_zeros,
)
from hvd_adaptive.coding.zeros import Zeros, runs_in

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
    "zeros",
)

# A payload, with its header if that has been read.
Received = torch.Tensor | Arrived


@dataclass(frozen=True)
class Form:
    """What all payloads of a quantiser, with its current table, of one frame have in common.

    The header has neither key nor checksum. It is that of a payload that leaves no zeros out, whose
    body is not coded and, if its length varies, has the most bytes.
    """

    quantizer: Quantizer
    header: Header
    body: int  # bytes of that body
    varies: bool  # whether the bytes of bodies vary
    coding: str  # of bodies that are coded

    @classmethod
    def of(cls, quantizer: Quantizer, frame: Frame) -> Form:
        """Return the form of payloads of ``frame``: numbers of coordinates, dtype and layout."""
        quantized = frame.coordinates - frame.full
        body = quantizer.body_bytes(quantized)
        alphabet, version, fingerprint = quantizer.table_state
        header = Header(
            dtype=frame.dtype,
            coding="fixed",
            alphabet=alphabet,
            checksum=0,
            scheme=quantizer.name,
            coordinates=frame.coordinates,
            full=frame.full,
            bucket_size=quantizer.settings.bucket_size,
            table_version=version,
            table_fingerprint=fingerprint,
            key=0,
            layout=frame.layout,
            length=payload_bytes(body, frame.full * frame.dtype.itemsize),
            settings=quantizer.codec_fingerprint,
            zeros=0,
        )
        coding = "fixed" if quantizer.coder is None else quantizer.settings.coding
        return cls(quantizer, header, body, quantizer.varies(quantized), coding)

    def encode(
        self, values: torch.Tensor, full: torch.Tensor, key: int, memory: OwnedBuffer | None
    ) -> Encoded:
        """Return a payload of ``values``, float32, which are quantised, and of coordinates in
        ``full`` precision; for ``memory`` see ``Payloads.encode``.
        """
        quantizer, header, size = self.quantizer, self.header._replace(key=key), self.body
        zeros = Zeros.of(values) if quantizer.leaves_zeros_out else None
        section, body = None, None
        if zeros is not None:
            section, values = zeros.section(), zeros.others_of(values)
            size = quantizer.body_bytes(values.numel())
            header = header._replace(zeros=section.numel())
        if self.varies if zeros is None else quantizer.varies(values.numel()):
            body = quantizer._body(values, key)
            coded = quantizer.coded_body(body, values.numel())
            if coded is not None:
                body, header = coded, header._replace(coding=self.coding)
            size = body.numel()
        if zeros is not None or body is not None:
            length = payload_bytes(size, full.numel() * full.itemsize, header.zeros)
            header = header._replace(length=length)
        if memory is None or memory.size < header.length:
            memory = OwnedBuffer(header.length, values.device)
        elif memory.size > header.length:
            memory = memory.part(0, header.length)
        runs, data = None if zeros is None else zeros.runs, memory.bytes
        payload = Encoded(header, data, data[SIZE : SIZE + size], runs, memory=memory)
        if body is None:
            quantizer.encode_body(values, payload.body, key)
        else:
            payload.body.copy_(body)
        if unused := -size % 8:
            data[SIZE + size : SIZE + size + unused] = 0
        if section is not None:
            payload.zeros.copy_(section)
        if full.numel():
            payload.full.copy_(full)
        if unused := -full.numel() * full.itemsize % 8:
            data[-unused:] = 0
        packed, checks = header.pack(), quantizer.settings.tuning.checksum
        seal = kernels.for_device(data.device, "checksum").seal
        seal(data, packed, body_seed(packed) if checks else None)
        return payload

    def open(self, payload: Received) -> Payload:
        """Return a received payload; raise PayloadError if its header differs, or does not fit the
        quantiser. Its checksum is not compared yet.
        """
        if isinstance(payload, torch.Tensor):
            payload = Arrived(read_header(payload), payload)
        header, data = payload
        own = self.header._replace(key=header.key, checksum=header.checksum)
        if header == own and not self.varies:
            return opened(data, header, self.body)
        own = own._replace(
            length=header.length,
            coding=header.coding if header.coding == "fixed" else self.coding,
            zeros=header.zeros if self.quantizer.leaves_zeros_out else 0,
        )
        if header != own:
            raise PayloadError(_difference(self.quantizer, header, own, self.coding))
        quantized = header.coordinates - header.full
        runs = runs_in(section_of_zeros(data, header), quantized)
        inside = quantized if runs is None else runs.others
        return opened(data, header, body_length(self.quantizer, header, inside), runs)

    def arrived(self, head: bytes, own: Payload, rank: int) -> Arrived:
        """Return a payload with the header that ``rank`` sent, whose first bytes are ``head``, or
        raise PayloadError. ``own`` has the header that it must have, without a checksum.
        """
        found = Header.unpack(head, own.header.length)
        if found._replace(checksum=0) == own.header:
            return Arrived(found, own.bytes)
        if all(getattr(found, field) == getattr(own.header, field) for field in _CHECKED):
            raise PayloadError(f"rank {rank} sent a payload of another step, group or chunk")
        raise PayloadError(_difference(self.quantizer, found, own.header, own.header.coding))

    def open_all(self, received: Sequence[Received]) -> tuple[list[Payload], HostCopy | None]:
        """Return opened payloads, and checksums that a GPU computes, for ``compare_checksums``; on
        the CPU they are compared here.
        """
        payloads = list(map(self.open, received))
        if not self.quantizer.settings.tuning.checksum:
            return payloads, None
        found = checksums(payloads)
        if isinstance(found, HostCopy):
            return payloads, found
        compare_checksums(found, payloads)
        return payloads, None


def body_length(quantizer: Quantizer, header: Header, quantized: int) -> int:
    """Return the bytes of the body of ``quantized`` coordinates in a payload with this header, with
    its padding if the length varies; raise PayloadError if no such body has this length.
    """
    if header.coding == "fixed":
        most, least = quantizer.body_bytes(quantized), quantizer.least_body_bytes(quantized)
        if least == most:
            return most
    else:
        most = padded(quantizer.body_bytes(quantized)) - 8
        least = quantizer.least_coded_bytes(quantized)
    full = header.full * header.dtype.itemsize
    size = header.length - payload_bytes(0, full, header.zeros)
    if size % 8 or not padded(least) <= size <= padded(most):
        raise PayloadError(
            f"payload has {header.length} bytes according to its header; its body of "
            f"{quantized} coordinates would have {size}, not {least} to {most}"
        )
    return size


def _difference(quantizer: Quantizer, header: Header, own: Header, known: str) -> str:
    """Return an error message that names the first difference."""
    field = next(f for f in _CHECKED if getattr(header, f) != getattr(own, f))
    if field == "coding":
        return f"payload has coding {header.coding!r}, this compressor {known!r}"
    if field == "zeros":
        return "payload leaves zeros out (keep_zeros=True), and this compressor does not"
    if field == "settings":
        settings = quantizer.codec_settings().items()
        listed = ", ".join(f"{name}={value!r}" for name, value in settings)
        return f"payload was encoded with other settings than {listed}"
    return (
        f"payload has {field.replace('_', ' ')} {getattr(header, field)}, "
        f"this compressor {getattr(own, field)}"
    )
