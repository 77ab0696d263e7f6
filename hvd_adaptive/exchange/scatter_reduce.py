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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.codec.second_stage import SecondStage, warn_of_averages
from hvd_adaptive.coding.payload import Encoded, OwnedBuffer, arrived, payloads_in
from hvd_adaptive.exchange.exchange import Exchange, FailedElsewhereError, RankInfo, Route
from hvd_adaptive.exchange.parcel import Parcel
from hvd_adaptive.layout import Group
from hvd_adaptive.transport.collectives import AllGather, AllToAll, EqualParts, copies_sent

FIRST, SECOND = 0, 1
# Sent instead of an average by an owner that could not read a payload.
FAILED = b"HVDAFAIL"


@dataclass(frozen=True)
class Chunk:
    """Quantised coordinates ``begin`` to ``end`` of a group, and its full-precision coordinates
    ``full_begin`` to ``full_end``.
    """

    begin: int
    end: int
    full_begin: int
    full_end: int

    @functools.cached_property
    def quantized(self) -> int:
        return self.end - self.begin

    @functools.cached_property
    def full(self) -> int:
        return self.full_end - self.full_begin

    @functools.cached_property
    def coordinates(self) -> int:
        return self.quantized + self.full

    def take(self, flat: torch.Tensor, chunk: torch.Tensor) -> None:
        """Copy the chunk of a group's tensor to ``chunk``, 1-D."""
        chunk[: self.quantized] = flat[self.begin : self.end]
        chunk[self.quantized :] = flat[self.full_begin : self.full_end]

    def frame(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the chunk of a group's tensor, a view if one of its sections is empty.

        If both exist, the quantised one is undefined: the caller encodes values from elsewhere.
        """
        if not self.full:
            return flat[self.begin : self.end]
        if not self.quantized:
            return flat[self.full_begin : self.full_end]
        frame = flat.new_empty(self.coordinates)
        frame[self.quantized :] = flat[self.full_begin : self.full_end]
        return frame

    def put(self, chunk: torch.Tensor, flat: torch.Tensor) -> None:
        """Invert ``take``: copy ``chunk`` to the group's tensor."""
        flat[self.begin : self.end] = chunk[: self.quantized]
        flat[self.full_begin : self.full_end] = chunk[self.quantized :]


@functools.lru_cache(maxsize=1024)
def cut(quantized: int, full: int, bucket_size: int, owners: int) -> tuple[Chunk, ...]:
    """Return a chunk for each owner, as equal as whole buckets allow, in the group's order."""
    buckets = -(-quantized // bucket_size)
    edges = [min(quantized, buckets * o // owners * bucket_size) for o in range(owners + 1)]
    full_edges = [quantized + full * o // owners for o in range(owners + 1)]
    return tuple(
        Chunk(edges[o], edges[o + 1], full_edges[o], full_edges[o + 1]) for o in range(owners)
    )


class ScatterReduceExchange(Exchange):
    """``hvd.alltoall`` of chunks, then ``hvd.allgather`` of their averages."""

    overlaps = True

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(rank_info)
        self.averages_of = (self.ranks,)

    def log_choices(self, groups: Sequence[Group], codecs: Mapping[str, Codec]) -> None:
        if self.rank == 0:
            self.warn(groups, codecs)

    def warn(
        self, groups: Sequence[Group], codecs: Mapping[str, Codec], nodes: bool = False
    ) -> None:
        """Warn if averages, of ranks or nodes, have an error that another setting avoids."""
        for part in dict.fromkeys(group.part for group in groups if self.quantized(group)):
            warn_of_averages(codecs[part], self.ranks, nodes)

    def in_flight_bytes(self, codec: Codec, quantized: int, full: int, dtype: torch.dtype) -> int:
        second = self._second_stage(codec)
        chunks = [c for c in self._chunks(codec, quantized, full) if c.coordinates]
        own = [codec.payloads.most_length(c.quantized, c.full, dtype) for c in chunks]
        averages = [second.most_length(c.quantized, c.full, dtype) for c in chunks]
        # First stage: payloads sent and received. Second stage: the own average and all averages.
        first = sum(own) + self.ranks * max(own, default=0)
        return max(first, copies_sent(self.ranks) * max(averages, default=0) + sum(averages))

    def collectives(self, coordinates: int) -> int:
        return 2

    def average(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Average a group as ``Exchange.average`` says.

        1. ``reduce`` chunks of the group, one on each rank.
        2. ``gather`` their averages.
        """
        reducing = self.reduce(parcel, flat, values)
        del flat, values
        try:
            mean: torch.Tensor | PayloadError = yield from reducing
        except PayloadError as error:
            mean = error  # the other ranks wait for this one in the second collective
        return (yield from self.gather(parcel, mean))

    def reduce(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Yield one collective, and return the average of the chunk that this rank owns.

        1. Encode a chunk for each owner.
        2. Send each rank its chunk.
        3. Check that each rank's payload is of this chunk, group and step.
        4. Decode the payloads of this rank's chunk, and add them in rank order.

        For the arguments see ``average``. The average is float32 (float64 if that is the group's
        dtype), quantised coordinates first; empty if this rank owns no chunk. Its memory may be
        borrowed.

        Raises:
            PayloadError: A payload arrived corrupt, perhaps on this rank alone.
        """
        own = self._chunks_of(parcel)[self.rank]
        request = [AllToAll(self._encoded_chunks(parcel, flat, values))]
        del flat, values

        # Horovod keeps the memory that is sent; no other reference to it remains.
        received = yield request.pop()

        if not own.coordinates:
            return parcel.wide("average", 0)
        payloads = arrived(received)
        for rank, payload in enumerate(payloads):
            if payload.header.key != parcel.key(rank, self.rank, FIRST):
                raise PayloadError(f"rank {rank} sent a payload of another step, group or chunk")

        begin = time.perf_counter()
        mean = parcel.wide("average", own.coordinates)
        expected = parcel.frame(own.quantized, own.full)
        quantized, full = mean[: own.quantized], mean[own.quantized :]
        parcel.codec.payloads.sum_into(payloads, expected, parcel.factor, quantized, full)
        parcel.spent("decode_s", begin)
        return mean

    def gather(self, parcel: Parcel, mean: torch.Tensor | PayloadError) -> Route:
        """Yield one collective, and return the whole group; see ``average``.

        1. Encode the average of this rank's chunk again, with more bits.
        2. Send it to all ranks.
        3. Check that each owner's payload is of this group and step, and decode it.

        If ``mean``, the result of ``reduce``, is an error, it is raised after the collective, and
        all other ranks raise one, too.
        """
        if isinstance(mean, PayloadError):
            failed = torch.frombuffer(bytearray(FAILED), dtype=torch.uint8)
            sent = OwnedBuffer.copy_of(failed, parcel.device)
        else:
            begin = time.perf_counter()
            sent = self._encoded_mean(parcel, mean)
            parcel.spent("encode_s", begin)

        averages = yield AllGather(sent)

        if isinstance(mean, PayloadError):
            raise mean
        begin = time.perf_counter()
        result = self._decoded(parcel, averages)
        parcel.spent("decode_s", begin)
        return result

    def _encoded_chunks(
        self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor
    ) -> list[OwnedBuffer]:
        """Return an encoded chunk for each owner; empty for ranks that own none."""
        begin = time.perf_counter()
        codec, chunks, used = parcel.codec, self._chunks_of(parcel), 0
        empty = memory = OwnedBuffer(0, flat.device)
        # On the CPU payloads are encoded contiguously, as they are sent; a GPU needs alignment.
        if flat.is_cpu and not codec.varies(parcel.quantized):
            size = sum(codec.payloads.most_length(c.quantized, c.full, flat.dtype) for c in chunks)
            memory = OwnedBuffer(size)
        payloads: dict[int, Encoded] = {}
        for owner, chunk in enumerate(chunks):
            if chunk.coordinates:
                payloads[owner] = payload = codec.payloads.encode(
                    chunk.frame(flat),
                    chunk.quantized,
                    parcel.key(self.rank, owner, FIRST),
                    parcel.layout,
                    values[chunk.begin : chunk.end],
                    memory.part(used),
                )
                used += payload.header.length
        parcel.encoded(list(payloads.values()), values, begin)
        return [
            payloads[owner].memory if owner in payloads else empty for owner in range(self.ranks)
        ]

    def _encoded_mean(self, parcel: Parcel, mean: torch.Tensor) -> OwnedBuffer:
        """Return the encoded average of this rank's chunk; empty if it owns none."""
        own = self._chunks_of(parcel)[self.rank]
        if not own.coordinates:
            return OwnedBuffer(0, parcel.device)
        second = self._second_stage(parcel.codec)
        quantized, key = second.quantized(own.quantized), parcel.key(self.rank, self.rank, SECOND)
        flat, payloads = parcel.narrowed(mean, own.quantized, self.ranks), second.payloads
        return payloads.encode(flat, quantized, key, parcel.layout, mean[:quantized]).memory

    def _decoded(self, parcel: Parcel, averages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole group, decoded from all owners' averages."""
        second = self._second_stage(parcel.codec)
        out, chunks = parcel.empty_result(), self._chunks_of(parcel)
        owners = [owner for owner, chunk in enumerate(chunks) if chunk.coordinates]
        own = [chunks[owner] for owner in owners]
        sizes = [second.length(chunk.quantized, chunk.full, parcel.dtype) for chunk in own]
        payloads = payloads_in(averages, owners, accumulate(sizes, initial=0), _check_not_failed)
        for payload, owner, chunk in zip(payloads, owners, own, strict=True):
            if payload.header.key != parcel.key(owner, owner, SECOND):
                raise PayloadError(f"rank {owner} sent an average of another step or group")
            again = second.quantized(chunk.quantized)
            expected = parcel.frame(again, chunk.coordinates - again)
            if expected.full == chunk.full:
                values = out[chunk.begin : chunk.end]
                full = out[chunk.full_begin : chunk.full_end]
                second.payloads.sum_into([payload], expected, 1.0, values, full)
            else:  # averages in full precision
                chunk.put(second.payloads.sum_wide([payload], expected, 1.0), out)
        return parcel.narrowed(out, parcel.quantized, self.ranks)

    def _second_stage(self, codec: Codec) -> SecondStage:
        return codec.second_stage(self.ranks)

    def _chunks_of(self, parcel: Parcel) -> Sequence[Chunk]:
        return self._chunks(parcel.codec, parcel.quantized, parcel.full)

    def _chunks(self, codec: Codec, quantized: int, full: int) -> Sequence[Chunk]:
        return cut(quantized, full, codec.settings.bucket_size, self.ranks)


class ShardReduce(ScatterReduceExchange):
    """FSDP's reduce-scatter: ``reduce`` of shards, chunks of one length, and no second stage.

    A group's coordinates are those of all shards, in the ranks' order; those in full precision come
    last. Ranks have compared their settings and the compressor's number before.
    """

    def collectives(self, coordinates: int) -> int:
        return 1

    def average(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Yield one collective, and return this rank's shard of the average, in float32."""
        payloads, own = parcel.codec.payloads, self._chunks_of(parcel)[self.rank]
        length_varies = parcel.codec.varies(own.quantized) or parcel.codec.leaves_zeros_out
        if length_varies or payloads.is_on_host(parcel.device):
            return self.reduce(parcel, flat, values)
        return self._reduce_known(parcel, flat, values)

    def _reduce_known(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Do as ``reduce``, but know all payloads' headers beforehand: a GPU is not waited for.

        1. Encode a shard for each rank, and send it.
        2. Decode what arrives, as what it must be, and add it in rank order.
        3. Leave the comparison of headers and checksums to ``parcel.unchecked``.
        """
        payloads, own = parcel.codec.payloads, self._chunks_of(parcel)[self.rank]
        request = [EqualParts(self._encoded_chunks(parcel, flat, values))]
        del flat, values

        received = yield request.pop()

        begin = time.perf_counter()
        form = payloads.form(parcel.frame(own.quantized, own.full))
        keys = [parcel.key(rank, self.rank, FIRST) for rank in range(self.ranks)]
        mean = parcel.wide("average", own.coordinates)
        sections = mean[: own.quantized], mean[own.quantized :]
        verify = payloads.sum_known(received, form, keys, parcel.factor, *sections)
        parcel.unchecked.append(verify)
        parcel.spent("decode_s", begin)
        return mean

    def _chunks(self, codec: Codec, quantized: int, full: int) -> Sequence[Chunk]:
        values, rest = quantized // self.ranks, full // self.ranks
        return [
            Chunk(
                values * owner,
                values * (owner + 1),
                quantized + rest * owner,
                quantized + rest * (owner + 1),
            )
            for owner in range(self.ranks)
        ]


def _check_not_failed(owner: int, head: bytes) -> None:
    """Raise FailedElsewhereError if ``owner`` has sent FAILED, not an average."""
    if head.startswith(FAILED):
        raise FailedElsewhereError(
            f"rank {owner} received a corrupt payload; its own error says more"
        )
