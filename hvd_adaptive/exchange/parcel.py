"""Define Parcel, one group of one step on its way through an exchange: plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from hvd_adaptive.base.tensors import HostCopy, narrowed, wide_of
from hvd_adaptive.codec.codec import Codec
from hvd_adaptive.codec.payloads import squares_of
from hvd_adaptive.coding.payload import Encoded, Frame
from hvd_adaptive.feedback import Residuals
from hvd_adaptive.kernels.random import Use, key_of, stream_key
from hvd_adaptive.monitor.meter import StepMeter

# Full buckets of a group on which the relative error is measured in each step.
ERROR_BUCKETS = 2


class Memory(Protocol):
    """The owner of memory that an exchange borrows until its next collective. Then another group
    may use it. Its contents are undefined at first.
    """

    def buffer(
        self, use: str, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for one use, 1-D."""
        return torch.empty(coordinates, dtype=dtype, device=device)

    def result(
        self, index: int, coordinates: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the average of group ``index``, 1-D. It may be the gradient's own, so
        call this only after the group's payloads are encoded.
        """
        return self.buffer("result", coordinates, dtype, device)


class NewMemory(Memory):
    """Memory that is allocated at each call."""


class RandomStream(NamedTuple):
    """Names of a group's random numbers, besides the rank.

    Attributes:
        number: Number of the compressor, the same on all ranks.
        group: Number of the group and attempt (``random.group_number``).
    """

    number: int
    seed: int
    step: int
    group: int


@dataclass(frozen=True)
class Parcel:
    """One group of one step, on this rank.

    Attributes:
        quantized: Number of quantised coordinates, which come first.
        full: Number of full-precision coordinates.
        stream: Names the group's random numbers.
        factor: Scale of sums over ranks.
        layout: Fingerprint of the layout, for payloads' headers.
        ranks: The ranks that exchange the group, in the exchange's order; () for all.
        memory: Owner of memory that may be used until the exchange's next collective.
        residuals: Residuals of error feedback of this rank; None without.
        after: Receives the group's residual after this step, by group.
        unchecked: Receives functions that raise PayloadError if what was decoded is corrupt; they
            wait for the device.
    """

    codec: Codec
    dtype: torch.dtype
    quantized: int
    full: int
    device: torch.device
    stream: RandomStream
    factor: float
    layout: int = 0
    index: int = 0
    ranks: Sequence[int] = ()
    memory: Memory = field(default_factory=NewMemory)
    meter: StepMeter = field(default_factory=StepMeter)
    residuals: Residuals | None = None
    after: dict[int, torch.Tensor] = field(default_factory=dict)
    unchecked: list[Callable[[], None]] = field(default_factory=list)

    def key(self, rank: int, *inside: int) -> int:
        """Return a rank's key of random numbers; ranks count as in the exchange.

        ``inside`` are numbers of a message of the group, if it has several. Coordinates count from
        a message's start, so equal keys would repeat numbers.
        """
        number, seed, step, group = self.stream
        key = key_of(number, seed, self.ranks[rank] if self.ranks else rank, step, group)
        return stream_key(key, *inside) if inside else key

    def frame(self, quantized: int, full: int) -> Frame:
        """Return the frame of a payload of these numbers of coordinates."""
        return Frame(quantized + full, full, self.dtype, self.layout)

    def wide(self, use: str, coordinates: int) -> torch.Tensor:
        """Return borrowed memory in float32, or in float64 if that is the group's dtype."""
        return self.memory.buffer(use, coordinates, wide_of(self.dtype), self.device)

    def empty_result(self) -> torch.Tensor:
        """Return borrowed memory for the whole group, as wide as ``wide``."""
        coordinates = self.quantized + self.full
        return self.memory.result(self.index, coordinates, wide_of(self.dtype), self.device)

    def narrowed(self, wide: torch.Tensor, quantized: int, ranks: int) -> torch.Tensor:
        """Return the result of ``ranks`` ranks in the group's dtype; ``wide`` may change, and sums
        are not limited.
        """
        averages = self.factor * ranks < 1 + 1e-6
        return narrowed(wide, quantized if averages else 0, self.dtype)

    def spent(self, figure: str, begin: float) -> None:
        """Add the seconds since ``begin`` to a figure of the step and of the group."""
        self.meter.add(self.index, **{figure: time.perf_counter() - begin})

    def encoded(self, payloads: Sequence[Encoded], values: torch.Tensor, begin: float) -> None:
        """Record this rank's payloads: their bytes, their error and the residual after this step.

        Call this once, before they are sent. They encode consecutive parts of ``values``, the
        quantised coordinates, since ``begin``.
        """
        size = 0
        for payload in payloads:
            if self.codec.count is not None:
                self.codec.count(payload)
            size += payload.header.length
        self.measure(values)
        if self.residuals is not None and self.quantized:
            after = self.residuals.after(self.index, values, self.codec, payloads)
            self.after[self.index] = after
            held = self.residuals.held_bytes(self.index) + after.nbytes
            self.meter.hold({f"residual of group {self.index}": held})
        seconds = time.perf_counter() - begin
        self.meter.add(self.index, payload_bytes=size, encode_s=seconds)

    def measure(self, flat: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Add the squared error of a few buckets to the step's figures.

        ERROR_BUCKETS full buckets are drawn at equal distances, beginning with a random one, and
        represent all full buckets; the partial bucket at the end is always included. ``dtype`` is
        that to which coordinates are rounded; None if the codec quantises them.
        """
        if not flat.numel():
            return
        size = self.codec.settings.bucket_size
        full, partial = divmod(flat.numel(), size)
        count = min(ERROR_BUCKETS, full)
        key = stream_key(self.index, 0, self.stream.step, Use.ERROR)
        buckets, weights = [], [full / count] * count if count else []
        for k in range(count):
            begin = (key + k * full // count) % full * size
            buckets.append(flat[begin : begin + size])
        if partial:
            buckets.append(flat[full * size :])
            weights.append(1.0)
        sample = torch.cat(buckets).to(torch.float32)
        if dtype is None:
            squares = self.codec.payloads.squared_errors(sample, key)
        else:
            error = sample.to(dtype).to(sample.dtype) - sample
            squares = torch.stack([squares_of(of, size) for of in (error, sample)], dim=1)
        self.meter.squares.append((HostCopy(squares), weights, self.index))
