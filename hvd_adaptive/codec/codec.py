"""Define Codec: payloads of a scheme's bodies, without ranks or Horovod."""

from __future__ import annotations

import logging
from abc import abstractmethod

import torch

from hvd_adaptive.codec.decoding import DecodingCodec
from hvd_adaptive.codec.zeros import most_section_bytes
from hvd_adaptive.coding import payload as payloads
from hvd_adaptive.coding.header import Frame, Header
from hvd_adaptive.coding.sendable import Sendable
from hvd_adaptive.kernels.block_sums import BlockSums
from hvd_adaptive.once import WarnOnce
from hvd_adaptive.settings import Settings

logger = logging.getLogger("hvd_adaptive")


class Codec(DecodingCodec):
    """A quantiser that encodes and decodes payloads."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._warn_of_copies = WarnOnce(logger)

    def payload_bytes(self, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Return the length of a payload without zeros; the most if its body varies or is coded.

        Args:
            quantized: Number of quantised coordinates.
            full: Number of full-precision coordinates.
            dtype: Their dtype.
        """
        return payloads.payload_bytes(self.body_bytes(quantized), full * dtype.itemsize)

    def most_payload_bytes(self, quantized: int, full: int, dtype: torch.dtype) -> int:
        """Return the most bytes of a payload; for the arguments see ``payload_bytes``."""
        zeros = most_section_bytes(quantized) if self.leaves_zeros_out else 0
        return self.payload_bytes(quantized, full, dtype) + zeros

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
                "%s: gradients on %s are copied to the host and encoded there, "
                "payloads copied back, which takes longer than the codes save on fast networks",
                self.name,
                device.type,
            )

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
        zeros = self.zeros_of(values)
        section = None if zeros is None else zeros.section()
        if zeros is not None:
            values = zeros.others_of(values)
        if self.varies(values.numel()):
            body = self._body(values, key)
            coded = self.coded_body(body, values.numel())
            coding, body = ("fixed", body) if coded is None else (self.settings.coding, coded)
        size = self.body_bytes(values.numel()) if body is None else body.numel()
        zeros_bytes = 0 if section is None else section.numel()
        full = flat.numel() - quantized
        header = self._header(
            Frame(flat.numel(), full, flat.dtype, layout), key, size, coding, zeros_bytes
        )
        if memory is None or memory.size < header.length:
            memory = Sendable(header.length, flat.device)
        runs = None if zeros is None else zeros.runs
        payload = payloads.Encoded.within(memory.part(0, header.length), header, size, runs)
        if body is None:
            result = self.encode_body(values, payload.body, key)
            sums = result if isinstance(result, BlockSums) and result.size == size else None
        else:
            payload.body.copy_(body)
        if section is not None:
            payload.zeros.copy_(section)
        if full:
            payload.full.copy_(flat[quantized:])
        payload.seal(self.settings.checksum, sums)
        return payload

    def known_header(self, frame: Frame, key: int) -> Header:
        """Return the header, without a checksum, of a payload whose length does not vary.

        Args:
            frame: Numbers of coordinates, dtype and layout.
            key: The sender's.
        """
        return self._header(frame, key, self.body_bytes(frame.coordinates - frame.full))

    def _header(
        self, frame: Frame, key: int, size: int, coding: str = "fixed", zeros: int = 0
    ) -> Header:
        """Return a header without a checksum; ``size`` is that of the body."""
        return Header(
            scheme=self.name,
            dtype=frame.dtype,
            coding=coding,
            alphabet=self.alphabet,
            coordinates=frame.coordinates,
            full=frame.full,
            bucket_size=self.settings.bucket_size,
            table_version=self.table_version,
            table_fingerprint=self.table_fingerprint,
            key=key,
            layout=frame.layout,
            length=payloads.payload_bytes(size, frame.full * frame.dtype.itemsize) + zeros,
            settings=self.codec_fingerprint,
            zeros=zeros,
        )

    # Codecs of averages ---------------------------------------------------------------------------

    @abstractmethod
    def second_codec(self, bits: int) -> Codec:
        """Return a codec for averages, unbiased and without clipping."""

    def fitted_to(self, flat: torch.Tensor) -> Codec:
        """Return this codec or, if it adapts, a copy of it that is fitted to ``flat``."""
        return self

    def trained_second(self, bits: int, ranks: int, flat: torch.Tensor) -> Codec:
        """Return a codec for averages of ``ranks`` ranks, fitted as training on ``flat`` fits it.

        flat: Gradients, float32, to which this codec is fitted.
        """
        return self.second_codec(bits).fitted_to(flat)
