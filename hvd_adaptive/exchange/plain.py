"""Gradients as they are, or rounded to bfloat16: where compressing would take longer than sending.

Horovod's own float16 overflows beyond 65,504 and loses gradients below 6e-8; bfloat16 has the range
of float32, and its rounding, at most 1/512 of a coordinate, is small beside any quantiser's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.base.errors import PayloadError
from hvd_adaptive.codec.second_stage import FULL_PRECISION, SecondStage
from hvd_adaptive.exchange.exchange import Route
from hvd_adaptive.exchange.parcel import Parcel
from hvd_adaptive.exchange.scatter_reduce import ScatterReduceExchange

if TYPE_CHECKING:
    from hvd_adaptive.adapt.updates import Updates
    from hvd_adaptive.codec.codec import Codec
    from hvd_adaptive.layout import Group


class Plain(ScatterReduceExchange):
    """The scatter-reduce of groups none of whose coordinates is quantised, in their own dtype."""

    def quantized(self, group: Group) -> int:
        return 0

    def prepare(self, updates: Updates, labels: Sequence[str], step: int) -> None:
        pass

    def in_flight_bytes(self, codec: Codec, quantized: int, full: int, dtype: torch.dtype) -> int:
        return super().in_flight_bytes(codec, 0, quantized + full, dtype)

    def reduce(self, parcel: Parcel, flat: torch.Tensor, values: torch.Tensor) -> Route:
        """Average a chunk as the base class does, of gradients that are rounded first."""
        plain = self._plain(parcel)
        with parcel.time("encode_s"):
            parcel.measure(flat, plain.dtype)
            reducing = super().reduce(plain, flat.to(plain.dtype), values[:0])
        del flat, values
        return (yield from reducing)

    def gather(self, parcel: Parcel, mean: torch.Tensor | PayloadError) -> Route:
        """Gather as the base class does, and return the group in its own dtype."""
        result = yield from super().gather(self._plain(parcel), mean)
        return result.to(parcel.dtype)

    def _plain(self, parcel: Parcel) -> Parcel:
        """Return the parcel with all its coordinates in the dtype that is sent."""
        full = parcel.quantized + parcel.full
        return replace(parcel, quantized=0, full=full, dtype=self._dtype(parcel.dtype))

    def _dtype(self, own: torch.dtype) -> torch.dtype:
        return own

    def _second_stage(self, codec: Codec) -> SecondStage:
        return SecondStage(self.ranks, FULL_PRECISION, codec)


class Half(Plain):
    """The same, float32 as bfloat16."""

    def _dtype(self, own: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if own == torch.float32 else own
