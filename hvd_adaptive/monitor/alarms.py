"""Warn, once for each kind, when compression does harm.

The figures of ``WINDOW`` steps are checked together.

Whether float32 would be faster cannot be measured without sending it, so it is bounded. A group's
bytes divided by its transfer time (including negotiation, latency and waiting for slower ranks) are
a lower bound of the link's rate. At the highest such rate a float32 ring takes at most

    2 (N - 1) / N · 4 bytes · coordinates / rate,

all of which is waiting time. Compression does not cause the waiting for slower ranks, so the
fastest step counts: the warning is issued if even this step took longer to encode, wait for and
decode payloads. Without a warning float32 may still be faster; ``exchange="auto"`` measures this.
"""

from __future__ import annotations

from collections.abc import Iterator

from hvd_adaptive.monitor.meter import StepFigures, StepMeter

WINDOW = 50
# First steps, which are skipped: kernels are compiled, and files are read for the first time.
FIRST = 5
# Least bytes of a group whose rate counts; smaller groups measure latency rather than the link.
LEAST_BYTES = 1 << 16


class Alarms:
    """Alarms of one compressor: limits of the relative squared error and of the share of non-finite
    buckets, None for no warning, and whether it ``compares`` with float32.
    """

    def __init__(self, error: float | None, non_finite: float | None) -> None:
        self._error_limit, self._non_finite_limit = error, non_finite
        self._warned: set[str] = set()
        self._skipped = 0
        self.compares = False
        self._empty()

    def _empty(self) -> None:
        self._steps, self._sum = 0, StepFigures()
        self._rate, self._fastest = 0.0, float("inf")

    def see(self, step: int, ranks: int, meter: StepMeter) -> dict[str, str]:
        """Add the figures of a completed step; return new warnings' texts by their kinds."""
        if meter.last is None or self._skipped < FIRST:
            self._skipped += 1
            return {}
        self._steps += 1
        self._sum.add(meter.last)
        spent = meter.last.encode_s + meter.last.exchange_s + meter.last.decode_s
        self._fastest = min(self._fastest, spent)
        for group in meter.last_groups.values():
            if group.flight_s > 0 and group.wire_bytes >= LEAST_BYTES:
                self._rate = max(self._rate, group.wire_bytes / group.flight_s)
        if self._steps < WINDOW:
            return {}
        new = {k: text for k, text in self._texts(step, ranks) if k not in self._warned}
        self._warned |= new.keys()
        self._empty()
        return new

    def _texts(self, step: int, ranks: int) -> Iterator[tuple[str, str]]:
        """Yield the kinds and texts of warnings about these steps."""
        steps, own = f"{WINDOW} steps (to step {step})", self._sum
        limit, norm = self._error_limit, own.squared_norm
        if limit is not None and norm and own.squared_error > limit * norm:
            yield (
                "error",
                f"the relative squared error of quantised gradients was "
                f"{own.squared_error / norm:.3g} over {steps}, above "
                f"error_limit={limit:g}: each rank adds more noise than its gradient has signal; "
                "more bits, a smaller bucket_size, norm='linf' or an adaptive scheme (ALQ, ECDQ) "
                "reduce it",
            )
        limit = self._non_finite_limit
        if limit is not None and own.non_finite > limit * own.buckets:
            yield (
                "non_finite",
                f"{own.non_finite:,} of {own.buckets:,} averaged buckets were not finite over "
                f"{steps}, more than non_finite_limit={limit:g} of them: gradients overflow, and a "
                "NaN or Inf makes its whole bucket NaN; a lower learning rate, gradient clipping "
                "or, with AMP, its GradScaler help",
            )
        if not self.compares or not self._rate:
            return
        ring = 2 * (ranks - 1) / ranks * 4 * own.coordinates / WINDOW / self._rate
        if ranks > 1 and self._fastest > ring:
            yield (
                "slow",
                f"compression costs time here: the fastest of {steps} took "
                f"{1e3 * self._fastest:.1f} ms to encode, wait and decode; float32 over a ring "
                f"would take {1e3 * ring:.1f} ms at most, on a link measured to carry "
                f"{self._rate / 1e6:.0f} MB/s; exchange='auto' measures what is fastest",
            )
