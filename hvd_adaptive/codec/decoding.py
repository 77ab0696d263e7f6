"""Define DecodingCodec, which decodes payloads and adds them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_adaptive.codec.bodies import BodyCodec
from hvd_adaptive.codec.zeros import alike, runs_in
from hvd_adaptive.coding import payload as payloads
from hvd_adaptive.coding.header import SIZE, Frame, Header
from hvd_adaptive.device import stacked
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.finite import narrowed

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
Received = torch.Tensor | payloads.Arrived


class DecodingCodec(BodyCodec):
    """A quantiser that decodes the payloads of its bodies."""

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
        self._decode_sections(opened, factor, out[:quantized], out[quantized:], self.decode_opened)
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
        self._decode_sections(opened, factor, values, full, self.decode_opened)
        verified()

    def decode_known(
        self,
        received: Sequence[torch.Tensor],
        headers: Sequence[Header],
        factor: float,
        values: torch.Tensor,
        full: torch.Tensor,
    ) -> Callable[[], None]:
        """Decode as ``decode_into`` payloads whose headers are known; never wait for a GPU.

        Args:
            received: Payloads of ranks that have compared their settings.
            headers: What their headers must be, without checksums (``Codec.known_header``).
            factor: Scale of the sum.
            values: As for ``decode_into``.
            full: As for ``decode_into``.

        Returns:
            A function that waits and raises PayloadError if a payload is another one, or corrupt.
            On the CPU this method raises it itself, before anything is decoded.
        """
        sizes = zip(received, headers, strict=True)
        opened = [
            payloads.opened(data, own, self.body_bytes(own.coordinates - own.full))
            for data, own in sizes
        ]
        heads = stacked([data[:SIZE] for data in received])
        sums = payloads.checksums(opened) if self.settings.checksum else None

        def verify() -> None:
            rows = zip(heads.get(), headers, strict=True)
            arrived = [
                self._same(Header.unpack(row.numpy().tobytes(), own.length), own, rank)
                for rank, (row, own) in enumerate(rows)
            ]
            if sums is not None:
                payloads.compare_checksums(sums(), [head.checksum for head in arrived])

        if not values.is_cuda:
            verify()
        self._decode_sections(opened, factor, values, full, self._decode_own)
        return verify if values.is_cuda else lambda: None

    def _same(self, found: Header, own: Header, rank: int) -> Header:
        """Return ``found``; raise PayloadError unless it is ``own`` with a checksum."""
        if found._replace(checksum=0) == own:
            return found
        if all(getattr(found, field) == getattr(own, field) for field in _CHECKED):
            raise PayloadError(f"rank {rank} sent a payload of another step, group or chunk")
        raise PayloadError(self._difference(found, own, own.coding))

    def _decode_own(
        self, opened: Sequence[payloads.Payload], factor: float, out: torch.Tensor, add: bool
    ) -> None:
        bodies, keys = [p.body for p in opened], [p.header.key for p in opened]
        self.decode_own_bodies(bodies, keys, factor, out, add)

    def _decode_sections(
        self,
        opened: Sequence[payloads.Payload],
        factor: float,
        values: torch.Tensor,
        full: torch.Tensor,
        decode: Callable[..., None],
    ) -> None:
        wide = values.dtype != torch.float32
        narrow = values.new_empty(values.shape, dtype=torch.float32) if wide else values
        decode(opened, factor, narrow, False)
        if wide:
            values.copy_(narrow)
        if not full.numel():
            return
        full.zero_()
        for payload in opened:
            full += payload.full.to(full.dtype)
        full *= factor

    def decode_opened(
        self,
        opened: Sequence[payloads.Payload],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
    ) -> None:
        """Set ``out`` (float32, 1-D) to factor * (out + the payloads' values, added in order).

        Coded bodies are expanded one at a time, so that memory does not grow with the ranks.

        Args:
            opened: Payloads with checked headers.
            factor: Scale of the sum.
            out: Result, in place.
            add: If False, the contents of ``out`` are ignored and count as zeros.
        """
        if self.is_on_host(out.device):
            copy = out.cpu() if add else torch.empty(out.shape, dtype=out.dtype, device="cpu")
            cpu = copy.device
            self.decode_opened([payload.to(cpu) for payload in opened], factor, copy, add)
            out.copy_(copy)
            return
        if all(payload.runs is None for payload in opened):
            self._decode_bodies(opened, factor, out, add)
            return
        for payloads_alike, zeros in alike(opened):
            if zeros is None:
                self._decode_bodies(payloads_alike, 1.0, out, add)
            else:
                others = zeros.others_of(out) if add else out.new_empty(zeros.runs.others)
                self._decode_bodies(payloads_alike, 1.0, others, add)
                zeros.put(others, out, clear=not add)
            add = True
        if factor != 1.0:
            out *= factor

    def _decode_bodies(
        self, opened: Sequence[payloads.Payload], factor: float, out: torch.Tensor, add: bool
    ) -> None:
        """Do as ``decode_opened``, for the coordinates of the bodies."""
        if all(p.header.coding == "fixed" for p in opened):
            bodies, keys = [p.body for p in opened], [p.header.key for p in opened]
            self.decode_bodies(bodies, keys, factor, out, add)
            return
        for number, payload in enumerate(opened, 1):
            body = payload.body
            if payload.header.coding != "fixed":
                body = self.fixed_body(body, out.numel())
            last = number == len(opened)
            key, adding = payload.header.key, add or number > 1
            self.decode_bodies([body], [key], factor if last else 1.0, out, adding)

    def body_length(self, header: Header, quantized: int) -> int:
        """Return the bytes of a payload's body, with its padding if the length varies.

        Args:
            header: The payload's.
            quantized: Number of coordinates in the body.

        Raises:
            PayloadError: No body of so many coordinates has this length.
        """
        if header.coding == "fixed":
            most, least = self.body_bytes(quantized), self.least_body_bytes(quantized)
            if least == most:
                return most
        else:
            most = payloads.padded(self.body_bytes(quantized)) - 8
            least = self.least_coded_bytes(quantized)
        full = header.full * header.dtype.itemsize
        size = header.length - header.zeros - payloads.payload_bytes(0, full)
        if size % 8 or not payloads.padded(least) <= size <= payloads.padded(most):
            raise PayloadError(
                f"payload has {header.length} bytes according to its header; its body of "
                f"{quantized} coordinates would have {size}, not {least} to {most}"
            )
        return size

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
            zeros=header.zeros if self.leaves_zeros_out else 0,
            checksum=header.checksum,
        )
        if header != own:
            raise PayloadError(self._difference(header, own, known))
        quantized = header.coordinates - header.full
        runs = runs_in(payloads.section_of_zeros(data, header), quantized)
        inside = quantized if runs is None else runs.others
        return payloads.opened(data, header, self.body_length(header, inside), runs)

    def _difference(self, header: Header, own: Header, known: str) -> str:
        """Return an error message that names the first difference."""
        field = next(f for f in _CHECKED if getattr(header, f) != getattr(own, f))
        if field == "coding":
            return f"payload has coding {header.coding!r}, this compressor {known!r}"
        if field == "zeros":
            return "payload leaves zeros out (keep_zeros=True), and this compressor does not"
        if field == "settings":
            listed = ", ".join(f"{name}={value!r}" for name, value in self.codec_settings().items())
            return f"payload was encoded with other settings than {listed}"
        return (
            f"payload has {field.replace('_', ' ')} {getattr(header, field)}, "
            f"this compressor {getattr(own, field)}"
        )
