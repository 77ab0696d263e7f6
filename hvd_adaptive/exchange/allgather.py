"""Every rank sends its payload to every other: for small numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.coding.payload import split
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.exchange import Exchange, Outgoing, Route, Shipment, memory_of
from hvd_adaptive.transport.collectives import AllGather, copies_sent

if TYPE_CHECKING:
    from hvd_adaptive.exchange.staged_codec import StagedCodec


class Allgather(Exchange):
    """``hvd.allgather`` of payloads; each rank decodes all of them."""

    def in_flight_bytes(
        self, codec: StagedCodec, quantized: int, full: int, dtype: torch.dtype
    ) -> int:
        # All ranks' payloads, and its own once more or, sent directly, for each of them.
        copies = self.ranks + copies_sent(self.ranks)
        return copies * codec.payload_bytes(quantized, full, dtype)

    def stages(self, coordinates: int) -> int:
        return 1

    def encode(
        self, shipment: Shipment, flat: torch.Tensor, values: torch.Tensor
    ) -> list[Outgoing]:
        s = shipment
        payload = s.codec.encode_payload(
            flat, s.quantized, s.key(self.rank), s.layout_fingerprint, values
        )
        s.count(payload.header.length)
        s.measure(values, None)
        return [payload]

    def route(self, shipment: Shipment, sent: Sequence[Outgoing]) -> Route:
        arrived = yield AllGather(memory_of(sent[0]))
        expected = shipment.frame(shipment.quantized, shipment.full)
        received = split(arrived, self.ranks)
        for rank, of_rank in enumerate(received):
            if not shipment.is_from(rank, of_rank.header.key):
                raise PayloadError(f"rank {rank} sent a payload of another step or group")
        with shipment.time("decode_s"):
            out = shipment.empty_result(arrived[0].device)
            values, full = out[: shipment.quantized], out[shipment.quantized :]
            shipment.codec.decode_into(received, expected, shipment.factor(), values, full)
            return shipment.narrowed(out, shipment.quantized, self.ranks)
