"""Gradients as they are, or rounded to bfloat16: where compressing would take longer than sending.

Horovod's own float16 overflows beyond 65,504 and loses gradients below 6e-8; bfloat16 has the range
of float32, and its rounding, at most 1/512 of a coordinate, is small beside any quantiser's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.exchange.exchange import Outgoing, Route, Shipment
from hvd_adaptive.exchange.scatter_reduce import ScatterReduce
from hvd_adaptive.exchange.second_stage import FULL_PRECISION, SecondStage

if TYPE_CHECKING:
    from hvd_adaptive.adapt.updates import Updates
    from hvd_adaptive.exchange.staged_codec import StagedCodec
    from hvd_adaptive.layout import Group


class Plain(ScatterReduce):
    """The scatter-reduce of groups none of whose coordinates is quantised, in their own dtype."""

    def quantized(self, group: Group) -> int:
        return 0

    def prepare(self, updates: Updates, labels: Sequence[str], step: int) -> None:
        pass

    def in_flight_bytes(
        self, codec: StagedCodec, quantized: int, full: int, dtype: torch.dtype
    ) -> int:
        return super().in_flight_bytes(codec, 0, quantized + full, dtype)

    def encode(
        self, shipment: Shipment, flat: torch.Tensor, values: torch.Tensor
    ) -> list[Outgoing]:
        plain = self._plain(shipment)
        shipment.measure(flat, plain.dtype)
        return super().encode(plain, flat.to(plain.dtype), values[:0])

    def route(self, shipment: Shipment, sent: Sequence[Outgoing]) -> Route:
        result = yield from super().route(self._plain(shipment), sent)
        return result.to(shipment.dtype)

    def _plain(self, shipment: Shipment) -> Shipment:
        full = shipment.quantized + shipment.full
        dtype = self._dtype(shipment.dtype)
        return dataclasses.replace(shipment, quantized=0, full=full, dtype=dtype)

    def _dtype(self, own: torch.dtype) -> torch.dtype:
        return own

    def _second_stage(self, codec: StagedCodec) -> SecondStage:
        return SecondStage(self.ranks, FULL_PRECISION, codec)


class Half(Plain):
    """The same, float32 as bfloat16."""

    def _dtype(self, own: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if own == torch.float32 else own
