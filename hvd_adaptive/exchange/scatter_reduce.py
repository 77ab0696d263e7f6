"""Exchange groups so that each rank averages one part for all; bytes do not grow with the ranks.

1. A rank cuts the group into one chunk for each rank, its owner, encodes each and sends them by
   alltoall.
2. The owner decodes all ranks' payloads of its chunk, averages them in rank order, in float32
   (float64 for float64), encodes the average with a codec of more bits (second_stage.py) and sends
   it to all by allgather.
3. All ranks, the owner included, decode the same bytes.

Chunks end at buckets' ends, so buckets are those of the whole group. The full-precision section is
cut likewise. If there are fewer buckets than ranks, some ranks own no chunk and send no average.

With error feedback the residual contains the first stage's error of this rank's own payloads. The
second stage is unbiased, and its error is in no residual.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.coding.header import Frame
from hvd_adaptive.coding.payload import Row, arrived
from hvd_adaptive.coding.sendable import Sendable
from hvd_adaptive.errors import PayloadError
from hvd_adaptive.exchange.chunks import Chunk, cut
from hvd_adaptive.exchange.exchange import (
    Exchange,
    FailedElsewhereError,
    Outgoing,
    Route,
    Shipment,
    memory_of,
)
from hvd_adaptive.exchange.second_stage import SecondStage
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.transport.collectives import AllGather, AllToAll, copies_sent

if TYPE_CHECKING:
    from hvd_adaptive.adapt.updates import Updates
    from hvd_adaptive.exchange.staged_codec import StagedCodec

FIRST, SECOND = 0, 1
# Sent instead of an average by an owner that could not read a payload.
FAILED = b"HVDAFAIL"


class ScatterReduce(Exchange):
    """``hvd.alltoall`` of chunks, then ``hvd.allgather`` of their averages."""

    def prepare(self, updates: Updates, labels: Sequence[str], step: int) -> None:
        updates.prepare_second_stages(self.ranks, labels, step)

    def in_flight_bytes(
        self, codec: StagedCodec, quantized: int, full: int, dtype: torch.dtype
    ) -> int:
        second = self._second_stage(codec)
        chunks = [c for c in self._chunks(codec, quantized, full) if c.coordinates]
        own = [codec.payload_bytes(c.quantized, c.full, dtype) for c in chunks]
        averages = [second.payload_bytes(c.quantized, c.full, dtype) for c in chunks]
        # First stage: payloads sent and received. Second stage: the own average and all averages.
        first = sum(own) + self.ranks * max(own, default=0)
        return max(first, copies_sent(self.ranks) * max(averages, default=0) + sum(averages))

    def stages(self, coordinates: int) -> int:
        return 2

    def encode(
        self, shipment: Shipment, flat: torch.Tensor, values: torch.Tensor
    ) -> list[Outgoing]:
        codec, key = shipment.codec, shipment.key(self.rank)
        chunks, used = self._chunks_of(shipment), 0
        empty = memory = Sendable(0, flat.device)
        # On the CPU payloads are encoded contiguously, as they are sent; a GPU needs alignment.
        if flat.is_cpu and not codec.varies(shipment.quantized):
            size = sum(codec.payload_bytes(c.quantized, c.full, flat.dtype) for c in chunks)
            memory = Sendable(size)
        payloads: list[Outgoing] = []
        for owner, chunk in enumerate(chunks):
            if not chunk.coordinates:
                payloads.append(empty)
                continue
            payload = codec.encode_payload(
                chunk.frame(flat),
                chunk.quantized,
                chunk_key(key, owner, FIRST),
                shipment.layout_fingerprint,
                values[chunk.begin : chunk.end],
                memory.part(used),
            )
            used += payload.header.length
            payloads.append(payload)
        shipment.count(used)
        shipment.measure(values, None)
        return payloads

    def route(self, shipment: Shipment, sent: Sequence[Outgoing]) -> Route:
        own = self._chunks_of(shipment)[self.rank]
        expected = shipment.frame(own.quantized, own.full) if own.coordinates else None
        # Horovod keeps the memory that is sent; keep no other reference meanwhile.
        request = [AllToAll([memory_of(part) for part in sent])]
        del sent
        received = yield request.pop()
        failure, average = None, Sendable(0, received[0].device)
        try:
            if expected is not None:
                average = self._average(shipment, received, expected)
        except PayloadError as error:
            # Other ranks wait for this one. They receive FAILED, so that all fail together.
            failed = torch.frombuffer(bytearray(FAILED), dtype=torch.uint8)
            failure, average = error, Sendable.copy_of(failed, average.device)
        del received
        averages = yield AllGather(average)
        if failure is not None:
            raise failure
        with shipment.time("decode_s"):
            return self._decode(shipment, averages)

    def _average(
        self, shipment: Shipment, received: Sequence[torch.Tensor], expected: Frame
    ) -> Sendable:
        """Return the encoded average of this rank's chunk."""
        codec, payloads = shipment.codec, arrived(received)
        for rank, payload in enumerate(payloads):
            of = functools.partial(chunk_key, owner=self.rank, stage=FIRST)
            if not shipment.is_from(rank, payload.header.key, of):
                raise PayloadError(f"rank {rank} sent a payload of another step, group or chunk")
        with shipment.time("decode_s"):
            average = shipment.wide("average", expected.coordinates, received[0].device)
            quantized = expected.coordinates - expected.full
            values, full = average[:quantized], average[quantized:]
            codec.decode_into(payloads, expected, shipment.factor(), values, full)
        with shipment.time("encode_s"):
            second = self._second_stage(codec)
            quantized = second.quantized(quantized)
            key = chunk_key(shipment.key(self.rank), self.rank, SECOND)
            values = average[:quantized]
            flat = shipment.narrowed(average, expected.coordinates - expected.full, self.ranks)
            encoded = second.codec.encode_payload(
                flat, quantized, key, shipment.layout_fingerprint, values
            )
            return encoded.memory

    def _decode(self, shipment: Shipment, averages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole group, decoded from all owners' averages."""
        second = self._second_stage(shipment.codec)
        out = shipment.empty_result(averages[0].device)
        chunks = self._chunks_of(shipment)
        sizes = (
            second.payload_bytes(c.quantized, c.full, shipment.dtype)
            for c in chunks
            if c.coordinates
        )
        row = Row(averages, accumulate(sizes, initial=0))
        for owner, chunk in enumerate(chunks):
            if not chunk.coordinates:
                continue
            if row.head(owner).startswith(FAILED):
                raise FailedElsewhereError(
                    f"rank {owner} received a corrupt payload; its own error says more"
                )
            payload = row.take(owner)
            of = functools.partial(chunk_key, owner=owner, stage=SECOND)
            if not shipment.is_from(owner, payload.header.key, of):
                raise PayloadError(f"rank {owner} sent an average of another step or group")
            again = second.quantized(chunk.quantized)
            expected = shipment.frame(again, chunk.coordinates - again)
            if expected.full == chunk.full:
                values = out[chunk.begin : chunk.end]
                full = out[chunk.full_begin : chunk.full_end]
                second.codec.decode_into([payload], expected, 1.0, values, full)
            else:  # averages in full precision
                chunk.put(second.codec.decode_wide([payload], expected, 1.0), out)
        row.end()
        return shipment.narrowed(out, shipment.quantized, self.ranks)

    def _second_stage(self, codec: StagedCodec) -> SecondStage:
        return codec.second_stage(self.ranks)

    def _chunks_of(self, shipment: Shipment) -> Sequence[Chunk]:
        return self._chunks(shipment.codec, shipment.quantized, shipment.full)

    def _chunks(self, codec: StagedCodec, quantized: int, full: int) -> Sequence[Chunk]:
        return cut(quantized, full, codec.settings.bucket_size, self.ranks)


def chunk_key(key: int, owner: int, stage: int) -> int:
    """Return the key of a chunk's random numbers.

    Coordinates count from the chunk's start, so equal keys would repeat numbers.
    """
    return stream_key(key, owner, stage)
