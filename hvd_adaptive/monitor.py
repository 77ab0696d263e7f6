"""What was sent and how good it was."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class StepFigures:
    """Figures of one step, on this rank.

    coordinates: gradient coordinates encoded.  uncompressed_bytes: their bytes as they are.
    payload_bytes: bytes encoded.  wire_bytes: bytes sent by this rank, computed from the exchange.
    squared_error, squared_norm: of the sampled buckets.
    encode_s, exchange_s, decode_s: seconds encoding, waiting for the exchange, decoding.
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
    peak_bytes: int = 0


class StepMeter:
    """Collects one step's figures while the last finished step's can be read."""

    def __init__(self) -> None:
        self.current = StepFigures()
        self._last: StepFigures | None = None
        self._held: dict[Hashable, int] = {}
        self._total = 0  # of these: there are a few for each group in flight

    def hold(self, what: Hashable, size: int) -> None:
        """From now on ``what`` takes so many bytes beyond the gradients: a group's payloads, sent
        or received; buffers; residuals; results that are kept."""
        self._total += size - self._held.pop(what, 0)
        if size:
            self._held[what] = size
            self.current.peak_bytes = max(self.current.peak_bytes, self._total)

    @contextmanager
    def time(self, field: str) -> Iterator[None]:
        """Add the seconds spent inside to ``field``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            setattr(self.current, field, getattr(self.current, field) + seconds)

    def add_payload(self, size: int) -> None:
        """So many bytes were encoded."""
        self.current.payload_bytes += size

    def clear(self) -> None:
        """Nothing is held any more."""
        self._held.clear()
        self._total = 0

    def finish(self) -> None:
        """The step is over."""
        self._last = self.current
        self.restart()

    def restart(self) -> None:
        """The step was given up, or is over; buffers and residuals stay."""
        self._held = {what: size for what, size in self._held.items() if isinstance(what, str)}
        self._total = sum(self._held.values())
        self.current = StepFigures(peak_bytes=self._total)

    def report(self) -> dict[str, float]:
        """The last step as a dict: coordinates, payload_bytes, wire_bytes, uncompressed_bytes,
        bits_per_coordinate, relative_error (squared, of a few sampled buckets; NaN where none
        could be measured), encode_s, exchange_s, decode_s, peak_bytes (memory held beyond the
        gradients: payloads in flight, buffers, residuals; not what encoding one group takes for a
        moment, nor Horovod's own buffers). Zeros before the first step."""
        last = self._last or StepFigures()
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
