"""Send every rank's payload to every other rank: for small numbers of ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.coding.payload import split
from hvd_adaptive.exchange.exchange import Exchange, Route
from hvd_adaptive.exchange.parcel import Parcel
from hvd_adaptive.transport.collectives import AllGather, copies_sent

if TYPE_CHECKING:
    from hvd_adaptive.codec.codec import Codec


class AllgatherExchange(Exchange):
    """``hvd.allgather`` of payloads; each rank decodes all of them."""

    def in_flight_bytes(self, codec: Codec, quantized: int, full: int, dtype: torch.dtype) -> int:
        # All ranks' payloads, and its own once more or, sent directly, for each of them.
        copies = self.ranks + copies_sent(self.ranks)
        return copies * codec.payloads.most_length(quantized, full, dtype)

    def stages(self, coordinates: int) -> int:
        return 1

    def collectives(self, coordinates: int) -> int:
        return 1

    def average(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Average a group as ``Exchange.average`` says.

        1. Encode the group.
        2. Send the payload to all ranks.
        3. Check that each rank's payload is of this group and step.
        4. Decode all payloads, and add them in rank order.
        """
        begin = time.perf_counter()
        payloads, key = parcel.codec.payloads, parcel.key(self.rank)
        payload = payloads.encode(flat, parcel.quantized, key, parcel.layout, values)
        parcel.encoded([payload], values, begin)
        del flat, values

        arrived = yield AllGather(payload.memory)

        received = split(arrived, self.ranks)
        for rank, of_rank in enumerate(received):
            if not parcel.is_from(rank, of_rank.header.key):
                raise PayloadError(f"rank {rank} sent a payload of another step or group")

        begin = time.perf_counter()
        out = parcel.empty_result()
        frame = parcel.frame(parcel.quantized, parcel.full)
        quantized, full = out[: parcel.quantized], out[parcel.quantized :]
        payloads.sum_into(received, frame, parcel.factor, quantized, full)
        result = parcel.narrowed(out, parcel.quantized, self.ranks)
        parcel.spent("decode_s", begin)
        return result
