"""Define Shipping: what the exchange of a step's groups needs to know of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hvd_adaptive.codec.errors import rounding_errors
from hvd_adaptive.device import HostCopy
from hvd_adaptive.exchange.exchange import Exchange, Shipment
from hvd_adaptive.kernels.random import stream_key
from hvd_adaptive.layout import Group, Layout
from hvd_adaptive.run.shares import Shares
from hvd_adaptive.streams import Use, group_number

if TYPE_CHECKING:
    from hvd_adaptive.compressor import GradientCompressor
    from hvd_adaptive.exchange.staged_codec import StagedCodec
    from hvd_adaptive.instances import Instance
    from hvd_adaptive.monitor import StepMeter

# Full buckets of a group on which the relative error is measured in each step.
ERROR_BUCKETS = 2


class Shipping:
    """Codecs, random keys, names and sizes of the groups of one attempt at a step.

    Args:
        compressor: The compressor.
        exchange: This rank's exchange.
        layout: The layout.
        number: The step, until ranks that differ in it have compared.
        attempt: The attempt at the step.
        name: Beginning of the names of collectives.
        meter: Measures what is sent.

    Attributes:
        number: The step.
    """

    def __init__(
        self,
        compressor: GradientCompressor,
        exchange: Exchange,
        layout: Layout,
        number: int,
        *,
        attempt: int = 0,
        name: str = "",
        meter: StepMeter,
    ) -> None:
        self.exchange, self.layout, self.number = exchange, layout, number
        self._compressor, self._meter = compressor, meter
        self._attempt, self._name = attempt, name

    def codec(self, index: int) -> StagedCodec:
        """Return the codec of the group's part."""
        return self._compressor.part(self.layout.groups[index].part)

    def quantized(self, index: int) -> int:
        """Return how many of a group's coordinates this step quantises: none in a warm-up."""
        if self.number < self._compressor.settings.warmup_steps:
            return 0
        return self.exchange.quantized(self.layout.groups[index])

    def name(self, index: int, stage: int) -> str:
        """Return the name of a group's collective, the same on all ranks."""
        return self.name_of(self.layout.labels[index] + (f".stage{stage}" if stage else ""))

    def name_of(self, label: str) -> str:
        """Return a collective's name; attempts differ, as they may be in flight together."""
        name = f"{self._name}.{label}"
        return name + (f".attempt{self._attempt}" if self._attempt else "")

    def working_bytes(self, index: int) -> int:
        """Return the most bytes that decoding a group holds."""
        quantized = self.quantized(index)
        full = self.layout.groups[index].coordinates - quantized
        return self.exchange.working_bytes(self.codec(index), quantized, full)

    def shares(self, groups: Sequence[Group], count: int, part: str) -> Shares:
        """Return the shares from which up to ``count`` buckets of ``part`` are drawn."""
        seed = self._compressor.settings.seed
        return Shares(
            self.exchange,
            groups,
            bucket_size=self._compressor.settings.bucket_size,
            count=count,
            key_of=lambda rank: self._instance.key(seed, rank, self.number, Use.SAMPLE),
            part=part,
        )

    def shipment(
        self,
        index: int,
        factor: Callable[[], float],
        memory: Callable[..., torch.Tensor],
    ) -> Shipment:
        """Return a group's shipment.

        Args:
            index: The group.
            factor: See ``Shipment.factor``.
            memory: See ``Shipment.memory``, after the group.
        """
        group, quantized, meter = self.layout.groups[index], self.quantized(index), self._meter
        return Shipment(
            codec=self.codec(index),
            dtype=group.dtype,
            quantized=quantized,
            full=group.coordinates - quantized,
            layout_fingerprint=self.layout.fingerprint,
            # Of a rank, as far as this one knows.
            key=lambda rank: self._instance.key(*self._stream(rank, index)),
            keys=lambda rank: self._instance.keys(*self._stream(rank, index)),
            factor=factor,
            time=lambda field: meter.time(field, index),
            count=lambda size: meter.add("payload_bytes", size, index),
            measure=functools.partial(self._measure, index),
            memory=functools.partial(memory, index),
        )

    @property
    def _instance(self) -> Instance:
        return self._compressor.instance

    def _stream(self, rank: int, index: int) -> tuple[int, int, int, int]:
        """Return what identifies a rank's random numbers for a group, within a compressor."""
        seed = self._compressor.settings.seed
        return seed, rank, self.number, group_number(index, self._attempt)

    def _measure(self, index: int, flat: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Add the squared error of a few buckets to the step's figures.

        ERROR_BUCKETS full buckets are drawn at equal distances, beginning with a random one, and
        represent all full buckets; the partial bucket at the end is always included.

        Args:
            index: The group.
            flat: Coordinates that this rank quantises.
            dtype: The dtype to which buckets are rounded; None if the codec quantises them.
        """
        if not flat.numel():
            return
        size = self._compressor.settings.bucket_size
        full, partial = divmod(flat.numel(), size)
        count, key = min(ERROR_BUCKETS, full), stream_key(index, 0, self.number, Use.ERROR)
        chosen = [(key + k * full // count) % full for k in range(count)]
        if partial:
            chosen.append(full)
        buckets = [flat[i * size : (i + 1) * size] for i in chosen]
        sample = torch.cat(buckets).to(torch.float32)
        if dtype is None:
            squares = self.codec(index).squared_errors(sample, key)
        else:
            squares = rounding_errors(sample, dtype, size)
        weights = [full / count for _ in chosen[:count]] + [1.0] * bool(partial)
        self._meter.measured(HostCopy(squares), weights, index)
