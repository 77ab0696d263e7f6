"""Average a group so that each rank keeps one shard of the average: FSDP's reduce-scatter.

It is the first stage of a scatter-reduce whose chunks are the shards, all of one length. A group's
coordinates are those of all shards, in the ranks' order; those in full precision come last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.exchange.exchange import Route
from hvd_adaptive.exchange.parcel import Parcel
from hvd_adaptive.exchange.scatter_reduce import FIRST, Chunk, ScatterReduceExchange
from hvd_adaptive.transport.collectives import EqualParts

if TYPE_CHECKING:
    from hvd_adaptive.codec.codec import Codec


class ShardReduce(ScatterReduceExchange):
    """``ScatterReduceExchange.reduce`` of equal chunks; there is no second stage.

    Ranks have compared their settings and the compressor's number before.
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
