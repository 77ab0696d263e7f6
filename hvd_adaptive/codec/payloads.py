"""Define Payloads: a quantiser's bodies with all that makes them payloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvd_adaptive.base.tensors import narrowed, stacked, wide_of
from hvd_adaptive.codec.form import Form, Received
from hvd_adaptive.codec.quantizer import Quantizer
from hvd_adaptive.coding.payload import (
    SIZE,
    Encoded,
    Frame,
    Header,
    OwnedBuffer,
    Payload,
    checksums,
    compare_checksums,
    opened,
    payload_bytes,
)
from hvd_adaptive.coding.zeros import Zeros, alike, most_section_bytes

MOST_FORMS = 1024


class Payloads:
    """Encode and decode payloads of one quantiser: header, checksum, lossless coder, zeros that are
    left out, coordinates in full precision, and copies of tensors that are encoded on the host.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        # The forms of frames, with the state of the table that they are for.
        self._forms: tuple[tuple[int, int, int], dict[Frame, Form]] = (0, 0, 0), {}

    def form(self, frame: Header | Frame) -> Form:
        """Return what payloads of a frame have in common."""
        own = Frame(frame.coordinates, frame.full, frame.dtype, frame.layout)
        state = self.quantizer.table_state
        of_state, forms = self._forms
        if of_state != state or len(forms) >= MOST_FORMS:
            of_state, forms = self._forms = state, {}
        if own not in forms:
            forms[own] = Form.of(self.quantizer, own)
        return forms[own]

    # Lengths and devices --------------------------------------------------------------------------

    def length(self, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Return the bytes of a payload of ``quantized`` and ``full`` coordinates, without zeros;
        the most if its body varies or is coded.
        """
        body = self.quantizer.body_bytes(quantized)
        return payload_bytes(body, full * dtype.itemsize)

    def most_length(self, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Return the most bytes of a payload; for the arguments see ``length``."""
        zeros = most_section_bytes(quantized) if self.quantizer.leaves_zeros_out else 0
        return self.length(quantized, full, dtype) + zeros

    def is_on_host(self, device: torch.device) -> bool:
        """Return whether tensors on ``device`` are copied to the host and encoded there."""
        return self.quantizer.encodes_on_host and device.type != "cpu"

    def check_device(self, device: torch.device) -> None:
        """Warn if encoding tensors on ``device`` is slow; raise ValueError if it is impossible."""
        if device.type == "cpu":
            return
        coding = self.quantizer.settings.coding
        if coding != "fixed":
            raise ValueError(
                f"coding={coding!r}: must be 'fixed' for tensors on {device.type}: "
                "lossless coders run on the CPU alone"
            )
        if self.is_on_host(device):
            self.quantizer.warn_of_copies(
                "%s: gradients on %s are copied to the host and encoded there, "
                "payloads copied back, which takes longer than the codes save on fast networks",
                self.quantizer.name,
                device.type,
            )

    # Encoding -------------------------------------------------------------------------------------

    def encode(
        self,
        flat: torch.Tensor,
        quantized: int,
        key: int,
        layout: int = 0,
        values: torch.Tensor | None = None,
        memory: OwnedBuffer | None = None,
    ) -> Encoded:
        """Return the payload of a vector.

        Args:
            flat: Coordinates (1-D). The first ``quantized`` are encoded, the others appended in
                full precision.
            key: Names the random numbers.
            layout: Fingerprint of the layout, for the header.
            values: Encoded in place of the first ``quantized`` coordinates, if given.
            memory: Memory on the same device, which is used from its beginning if it suffices.
        """
        values = (flat[:quantized] if values is None else values).to(torch.float32)
        if not flat.is_cpu and self.is_on_host(flat.device):
            copies = flat.cpu(), quantized, key, layout, values.cpu()
            return self.encode(*copies).to(flat.device)
        frame = Frame(flat.numel(), flat.numel() - quantized, flat.dtype, layout)
        return self.form(frame).encode(values, flat[quantized:], key, memory)

    def zeros_of(self, flat: torch.Tensor) -> Zeros | None:
        """Return the zeros of ``flat`` (float32, 1-D) to leave out, or None; wait for a GPU."""
        return Zeros.of(flat) if self.quantizer.leaves_zeros_out else None

    # Sums of payloads -----------------------------------------------------------------------------

    def sum(
        self, received: Sequence[Received], expected: Header | Frame, factor: float
    ) -> torch.Tensor:
        """Return ``sum_wide`` in ``expected``'s dtype; averages of finite values stay finite."""
        wide = self.sum_wide(received, expected, factor)
        if factor * len(received) > 1:  # a sum, which may be too large for the dtype
            return wide.to(expected.dtype)
        quantized = expected.coordinates - expected.full
        largest = torch.finfo(torch.float32).max
        wide[:quantized].clamp_(-largest, largest)
        return narrowed(wide, quantized, expected.dtype)

    def sum_wide(
        self, received: Sequence[Received], expected: Header | Frame, factor: float
    ) -> torch.Tensor:
        """Return factor * sum of payloads, added in order: float32, or float64 if ``expected`` is,
        with quantised sums of float32. Raise PayloadError if a payload differs from ``expected`` in
        coordinates, dtype or layout, does not fit the quantiser, or is corrupt.
        """
        payloads, found = self.form(expected).open_all(received)
        # Sizes come from headers, so verify everything before memory is allocated.
        if found is not None:
            compare_checksums(found, payloads)
        dtype, device = wide_of(expected.dtype), payloads[0].bytes.device
        out = torch.empty(expected.coordinates, dtype=dtype, device=device)
        quantized = expected.coordinates - expected.full
        self._sum_sections(payloads, factor, out[:quantized], out[quantized:])
        return out

    def sum_into(
        self,
        received: Sequence[Received],
        expected: Header | Frame,
        factor: float,
        values: torch.Tensor,
        full: torch.Tensor,
    ) -> None:
        """Write the two sections of ``sum_wide`` to given memory of its dtype, whose contents are
        undefined if PayloadError is raised.
        """
        payloads, found = self.form(expected).open_all(received)
        self._sum_sections(payloads, factor, values, full)
        if found is not None:  # a device decodes while the host waits for the checksums
            compare_checksums(found, payloads)

    def sum_known(
        self,
        received: Sequence[torch.Tensor],
        form: Form,
        keys: Sequence[int],
        factor: float,
        values: torch.Tensor,
        full: torch.Tensor,
    ) -> Callable[[], None]:
        """Do as ``sum_into`` with payloads of ranks that have compared their settings, all of one
        ``form`` and of one length; never wait for a GPU.

        Return a function that waits and raises PayloadError if a payload is another one, or
        corrupt. On the CPU this method raises it itself, before anything is decoded.
        """
        headers = [form.header._replace(key=key) for key in keys]
        pairs = zip(received, headers, strict=True)
        payloads = [opened(data, own, form.body) for data, own in pairs]
        heads = stacked([data[:SIZE] for data in received])
        sums = checksums(payloads) if self.quantizer.settings.tuning.checksum else None

        def verify() -> None:
            rows = enumerate(zip(heads.get(), payloads, strict=True))
            arrived = [form.arrived(row.numpy().tobytes(), own, rank) for rank, (row, own) in rows]
            if sums is not None:
                compare_checksums(sums, arrived)

        if not values.is_cuda:
            verify()
        self._sum_sections(payloads, factor, values, full, own=True)
        return verify if values.is_cuda else lambda: None

    def add(
        self,
        opened: Sequence[Payload],
        factor: float,
        out: torch.Tensor,
        add: bool = True,
        own: bool = False,
    ) -> None:
        """Set ``out`` (float32, 1-D) to factor * (out + the payloads' values, added in order); see
        ``Quantizer.decode_bodies``, or ``decode_own_bodies`` if they are ``own``. Coded bodies are
        expanded one at a time, so that memory does not grow with the ranks.
        """
        if not out.is_cpu and self.is_on_host(out.device):
            copy = out.cpu() if add else torch.empty(out.shape, dtype=out.dtype, device="cpu")
            self.add([payload.to(copy.device) for payload in opened], factor, copy, add)
            out.copy_(copy)
            return
        bodies, keys = [], []
        for payload in opened:
            if payload.runs is not None or payload.header.coding != "fixed":
                self._add_expanded(opened, factor, out, add)
                return
            bodies.append(payload.body)
            keys.append(payload.header.key)
        decode = self.quantizer.decode_own_bodies if own else self.quantizer.decode_bodies
        decode(bodies, keys, factor, out, add)

    def _add_expanded(
        self, opened: Sequence[Payload], factor: float, out: torch.Tensor, add: bool
    ) -> None:
        """Do as ``add``, for payloads that leave zeros out or are coded."""
        if all(payload.runs is None for payload in opened):
            self._add_bodies(opened, factor, out, add)
            return
        for payloads_alike, zeros in alike(opened):
            if zeros is None:
                self._add_bodies(payloads_alike, 1.0, out, add)
            else:
                others = zeros.others_of(out) if add else out.new_empty(zeros.runs.others)
                self._add_bodies(payloads_alike, 1.0, others, add)
                zeros.put(others, out, clear=not add)
            add = True
        if factor != 1.0:
            out *= factor

    def _sum_sections(
        self,
        opened: Sequence[Payload],
        factor: float,
        values: torch.Tensor,
        full: torch.Tensor,
        own: bool = False,
    ) -> None:
        """Write factor * sum of payloads to the memory of its two sections."""
        wide = values.dtype != torch.float32
        narrow = values.new_empty(values.shape, dtype=torch.float32) if wide else values
        self.add(opened, factor, narrow, False, own)
        if wide:
            values.copy_(narrow)
        if not full.numel():
            return
        full.zero_()
        for payload in opened:
            full += payload.full.to(full.dtype)
        full *= factor

    def _add_bodies(
        self, opened: Sequence[Payload], factor: float, out: torch.Tensor, add: bool
    ) -> None:
        """Do as ``add``, for the coordinates of the bodies."""
        if all(p.header.coding == "fixed" for p in opened):
            bodies, keys = [p.body for p in opened], [p.header.key for p in opened]
            self.quantizer.decode_bodies(bodies, keys, factor, out, add)
            return
        for number, payload in enumerate(opened, 1):
            body = payload.body
            if payload.header.coding != "fixed":
                body = self.quantizer.fixed_body(body, out.numel())
            last = number == len(opened)
            key, adding = payload.header.key, add or number > 1
            self.quantizer.decode_bodies([body], [key], factor if last else 1.0, out, adding)

    # Measures of a payload's error ----------------------------------------------------------------

    def roundtrip(self, flat: torch.Tensor, key: int) -> torch.Tensor:
        """Return ``flat`` (float32) as a receiver would decode it."""
        if self.is_on_host(flat.device):
            return self.roundtrip(flat.cpu(), key).to(flat.device)
        zeros = self.zeros_of(flat)
        if zeros is None:
            return self.quantizer.body_roundtrip(flat, key)
        others = self.quantizer.body_roundtrip(zeros.others_of(flat), key)
        return zeros.put(others, torch.empty_like(flat))

    def squared_errors(self, flat: torch.Tensor, key: int) -> torch.Tensor:
        """Return the squared error and the squared L2 norm of each bucket of ``flat``, float64
        (buckets, 2).

        The error is the expected one if the quantiser ``knows_errors`` and no zeros are left out,
        which would change the buckets; else that of one draw by ``key``.
        """
        if self.quantizer.knows_errors and self.zeros_of(flat) is None:
            return self.quantizer.expected_errors(flat)
        size = self.quantizer.settings.bucket_size
        error = self.roundtrip(flat, key).sub_(flat)
        return torch.stack([squares_of(values, size) for values in (error, flat)], dim=1)


def squares_of(flat: torch.Tensor, bucket_size: int) -> torch.Tensor:
    """Return each bucket's squared L2 norm, float64 (buckets,)."""
    buckets = flat.to(torch.float64).split(bucket_size)
    return torch.stack(list(map(torch.dot, buckets, buckets)))
