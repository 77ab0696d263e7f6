"""What a step sent and how good it was, on this rank."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hvd_adaptive.device import Later


@dataclass
class StepFigures:
    """Figures of one step, or of one of its groups, on this rank.

    coordinates: gradient coordinates encoded.  uncompressed_bytes: their bytes as they are.
    payload_bytes: bytes encoded.  wire_bytes: bytes sent by this rank, computed from the exchange.
    squared_error, squared_norm: of all coordinates that this rank quantises or sends rounded,
    estimated from the buckets measured.
    encode_s, exchange_s, decode_s: seconds encoding, waiting for the exchange, decoding.
    flight_s: seconds from handing collectives to Horovod until their results were taken, added up
        over groups, which overlap; measured where there is a monitor.
    peak_bytes: the most memory that was held at a time: see StepMeter.hold.
    """

    coordinates: int = 0
    uncompressed_bytes: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    squared_error: float = 0.0
    squared_norm: float = 0.0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0
    flight_s: float = 0.0
    peak_bytes: int = 0


class StepMeter:
    """Collects one step's figures while the last finished step's can be read.

    detailed: whether it keeps each group's figures and looks for buckets that are not finite.
    """

    def __init__(self) -> None:
        self.detailed = False
        self.current = StepFigures()
        self.last: StepFigures | None = None
        self.last_groups: dict[int, StepFigures] = {}
        self.last_non_finite: dict[int, torch.Tensor] = {}
        self._groups: dict[int, StepFigures] = {}
        self._non_finite: dict[int, torch.Tensor] = {}
        self._squares: list[tuple[Later, Sequence[float], int]] = []
        self._held: dict[Hashable, int] = {}
        self._total = 0  # of these: there are a few for each group in flight

    def hold(self, what: Hashable, size: int) -> None:
        """From now on ``what`` takes so many bytes beyond the gradients: a group's payloads, sent
        or received; buffers; residuals; results that are kept."""
        self._total += size - self._held.pop(what, 0)
        if size:
            self._held[what] = size
            self.current.peak_bytes = max(self.current.peak_bytes, self._total)

    def add(self, field: str, amount: float, group: int | None = None) -> None:
        """So much more of a field, of one of the step's groups if there are several."""
        own = self.current
        setattr(own, field, getattr(own, field) + amount)
        if self.detailed and group is not None:
            of_group = self._groups.get(group)
            if of_group is None:
                of_group = self._groups[group] = StepFigures()
            setattr(of_group, field, getattr(of_group, field) + amount)

    @contextmanager
    def time(self, field: str, group: int | None = None) -> Iterator[None]:
        """Add the seconds spent inside to ``field``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(field, time.perf_counter() - begin, group)

    def look(self, decoded: torch.Tensor, bucket_size: int, group: int) -> None:
        """Count the buckets of a group's quantised coordinates, averaged, that are not finite.

        A bucket with one such coordinate has no others: its first tells. The count stays on the
        tensor's device until it is read.
        """
        if self.detailed and decoded.numel():
            self._non_finite[group] = decoded[::bucket_size].isfinite().logical_not_().sum()

    def measured(self, squares: Later, weights: Sequence[float], group: int) -> None:
        """Rows of [squared error, squared norm] of a group's sampled buckets, and of how many of
        its buckets each one stands. Rows that are not finite count nothing."""
        self._squares.append((squares, weights, group))

    def _add_squares(self) -> None:
        """They are there by the end of the step: they were asked for before the group was sent."""
        for squares, weights, group in self._squares:
            rows = zip(squares.get().tolist(), weights, strict=True)
            finite = [(e * w, n * w) for (e, n), w in rows if math.isfinite(e) and math.isfinite(n)]
            if finite:
                self.add("squared_error", sum(error for error, _ in finite), group)
                self.add("squared_norm", sum(norm for _, norm in finite), group)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._held.clear()
        self._total = 0

    def finish(self) -> None:
        """The step is over."""
        self._add_squares()
        self.last, self.last_groups = self.current, self._groups
        self.last_non_finite = self._non_finite
        self.restart()

    def restart(self) -> None:
        """The step was given up, or is over; buffers and residuals stay."""
        self._held = {what: size for what, size in self._held.items() if isinstance(what, str)}
        self._total = sum(self._held.values())
        self.current = StepFigures(peak_bytes=self._total)
        self._groups, self._non_finite, self._squares = {}, {}, []

    def report(self) -> dict[str, float]:
        """The last step as a dict: coordinates, payload_bytes, wire_bytes, uncompressed_bytes,
        bits_per_coordinate, relative_error (||Q(v) - v||²/||v||² of all coordinates v that this
        rank quantises, or sends as exchange="auto" rounds them, estimated from a few full buckets
        and all partial ones; with exchange="hierarchical" v is its slice of its node's mean; for
        schemes with a level table the expectation over their rounding; NaN where none could be
        measured), encode_s, exchange_s, decode_s, peak_bytes (memory held beyond the
        gradients: payloads in flight, buffers, residuals; not what encoding one group takes for a
        moment, nor Horovod's own buffers). Zeros before the first step."""
        last = self.last or StepFigures()
        bits = 8 * last.payload_bytes / last.coordinates if last.coordinates else 0.0
        error = last.squared_error / last.squared_norm if last.squared_norm else float("nan")
        return {
            "coordinates": last.coordinates,
            "payload_bytes": last.payload_bytes,
            "wire_bytes": last.wire_bytes,
            "uncompressed_bytes": last.uncompressed_bytes,
            "bits_per_coordinate": bits,
            "relative_error": error,
            "encode_s": last.encode_s,
            "exchange_s": last.exchange_s,
            "decode_s": last.decode_s,
            "peak_bytes": last.peak_bytes,
        }
