"""Average a group so that each rank keeps one shard of the average: FSDP's reduce-scatter.

It is the first stage of a scatter-reduce whose chunks are the shards, all of one length. A group's
coordinates are those of all shards, in the ranks' order; those in full precision come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.exchange.chunks import Chunk
from hvd_adaptive.exchange.exchange import Route
from hvd_adaptive.exchange.parcel import Parcel
from hvd_adaptive.exchange.scatter_reduce import ScatterReduce

if TYPE_CHECKING:
    from hvd_adaptive.exchange.staged_codec import StagedCodec


class ShardReduce(ScatterReduce):
    """``ScatterReduce.reduce`` of equal chunks; there is no second stage."""

    def collectives(self, coordinates: int) -> int:
        return 1

    def average(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Yield one collective, and return this rank's shard of the average, in float32."""
        return self.reduce(parcel, flat, values)

    def _chunks(self, codec: StagedCodec, quantized: int, full: int) -> Sequence[Chunk]:
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
